# The standalone server. Build: docker build -t millrace . (not exercised by CI)
FROM rust:1.95-bookworm AS build
WORKDIR /build
COPY . .
RUN cargo build --profile dist --locked --bin millrace && cp target/dist/millrace /millrace

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --home-dir /var/lib/millrace millrace
COPY --from=build /millrace /usr/local/bin/millrace
USER millrace
VOLUME /var/lib/millrace
EXPOSE 4566
# Clients of other hosts need a password, and behind a published port every client is one: MILLRACE_ROOT_PASSWORD gives the
# user root its first. The console has no passwords and stays within the container.
ENV MILLRACE_LISTEN=0.0.0.0:4566 MILLRACE_HTTP=127.0.0.1:5691 MILLRACE_DATA_DIR=/var/lib/millrace
HEALTHCHECK --interval=5s --timeout=6s --start-period=60s CMD ["millrace", "health"]
ENTRYPOINT ["millrace"]
CMD ["standalone"]
