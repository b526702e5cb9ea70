#!/usr/bin/env bash
# Puts binaries without debug information where the target `runtime` of the Dockerfile takes them from.
#
#   docker/binaries.sh DIR [TO]      millrace and millrace-s3 are in DIR, as target/debug or target/dist;
#                                    TO: docker/bin, or that of another build context
set -euo pipefail
from="${1:?the directory of the binaries}"
to="${2:-$(dirname "$0")/bin}"
mkdir -p "$to"
for name in millrace millrace-s3; do
  strip -o "$to/$name" "$from/$name"
done
