# The standalone server. Build: docker build -t millrace . (not exercised by CI)
FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY . .
RUN cargo build --release --locked --bin millrace && cp target/release/millrace /millrace

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --home-dir /var/lib/millrace millrace
COPY --from=build /millrace /usr/local/bin/millrace
USER millrace
VOLUME /var/lib/millrace
# Clients of other hosts need a password, and behind a published port every client is one: without users that have
# passwords run it in the host's network.
ENTRYPOINT ["millrace", "standalone", "--data-dir", "/var/lib/millrace"]
