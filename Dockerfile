# Images of the server and of millrace-s3, the object store of tests and demos. Those of `runtime` need no BuildKit.
#
# runtime: takes binaries that are there, from a directory of this repository; needs no registry.
#   docker/base-image.sh
#   cargo build --profile dist -p millrace -p millrace-s3 && docker/binaries.sh target/dist
#   docker build --target runtime -t millrace .
#
# runtime-proxy: haproxy in front of the frontends of docker-compose.yml, with the server's binary for its health check.
#
# build, build-proxy: the same, but they compile the binaries, and pull two images. With BuildKit: the builder before it
# begins with the stages of `runtime` whatever the target is.
#   DOCKER_BUILDKIT=1 docker build --target build -t millrace .
ARG BASE=millrace-base:bookworm
ARG PROXY_BASE=millrace-proxy-base:bookworm
FROM ${BASE} AS runtime
ARG BINARIES=docker/bin
COPY ${BINARIES}/millrace ${BINARIES}/millrace-s3 /usr/local/bin/
# A new volume takes its owner from here.
COPY --chown=999:999 docker/data /var/lib/millrace
USER 999:999
VOLUME /var/lib/millrace
EXPOSE 4566
# Clients of other hosts need a password, and behind a published port every client is one: MILLRACE_ROOT_PASSWORD gives the
# user root its first. The console has no passwords and stays within the container.
ENV MILLRACE_LISTEN=0.0.0.0:4566 MILLRACE_HTTP=127.0.0.1:5691 MILLRACE_DATA_DIR=/var/lib/millrace
HEALTHCHECK --interval=5s --timeout=6s --start-period=60s CMD ["millrace", "health"]
ENTRYPOINT ["millrace"]
CMD ["standalone"]

FROM ${PROXY_BASE} AS runtime-proxy
ARG BINARIES=docker/bin
COPY ${BINARIES}/millrace /usr/local/bin/
COPY docker/haproxy.cfg /etc/haproxy/haproxy.cfg
USER 999:999
EXPOSE 4566
ENV MILLRACE_HTTP=127.0.0.1:8404
HEALTHCHECK --interval=2s --timeout=6s --start-period=10s CMD ["millrace", "health"]
ENTRYPOINT ["haproxy", "-db", "-f", "/etc/haproxy/haproxy.cfg"]

FROM rust:1.95-bookworm AS compile
WORKDIR /build
COPY . .
RUN cargo build --profile dist --locked -p millrace -p millrace-s3 \
    && mkdir /binaries && cp target/dist/millrace target/dist/millrace-s3 /binaries/

FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*
COPY --from=compile /binaries/ /usr/local/bin/
COPY --chown=999:999 docker/data /var/lib/millrace
USER 999:999
VOLUME /var/lib/millrace
EXPOSE 4566
ENV MILLRACE_LISTEN=0.0.0.0:4566 MILLRACE_HTTP=127.0.0.1:5691 MILLRACE_DATA_DIR=/var/lib/millrace
HEALTHCHECK --interval=5s --timeout=6s --start-period=60s CMD ["millrace", "health"]
ENTRYPOINT ["millrace"]
CMD ["standalone"]

FROM debian:bookworm-slim AS build-proxy
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates haproxy \
    && rm -rf /var/lib/apt/lists/*
COPY --from=compile /binaries/millrace /usr/local/bin/
COPY docker/haproxy.cfg /etc/haproxy/haproxy.cfg
USER 999:999
EXPOSE 4566
ENV MILLRACE_HTTP=127.0.0.1:8404
HEALTHCHECK --interval=2s --timeout=6s --start-period=10s CMD ["millrace", "health"]
ENTRYPOINT ["haproxy", "-db", "-f", "/etc/haproxy/haproxy.cfg"]
