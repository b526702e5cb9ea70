#!/usr/bin/env bash
# Makes the images that the targets `runtime` and `runtime-proxy` of the Dockerfile begin with, from Debian's packages: no
# registry is asked.
#
#   docker/base-image.sh      the tags that the Dockerfile names: millrace-base:bookworm and millrace-proxy-base:bookworm
#
# Images of these tags that are there already stay.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# What a binary's dynamic libraries need (libc, libgcc, OpenSSL for builds with Kafka's TLS), certificates, base files.
base="base-files netbase ca-certificates libc6 libgcc-s1 libstdc++6 libssl3 zlib1g tzdata"
# haproxy and what it is linked with.
proxy="haproxy libcap2 libcrypt1 libgcrypt20 libgpg-error0 liblua5.3-0 liblz4-1 liblzma5 libopentracing1
  libopentracing-c-wrapper0 libpcre2-8-0 libsystemd0 libzstd1"

# Names of packages have no blanks.
"$here/package-image.sh" millrace-base:bookworm $base
"$here/package-image.sh" millrace-proxy-base:bookworm $base $proxy
