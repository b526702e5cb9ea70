#!/usr/bin/env bash
# Makes an image that holds Debian's packages and nothing else: no registry is asked.
#
#   docker/package-image.sh TAG PACKAGE...      an image of this tag that is there already stays
#
# Packages are not resolved: name those that these depend on, too. The image has certificates, and the user `millrace`
# (999); no shell and no package manager.
set -euo pipefail
tag="${1:?the tag of the image}"
shift

if docker image inspect "$tag" >/dev/null 2>&1; then
  echo "$tag is there already"
  exit 0
fi
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/packages" "$scratch/root"
cd "$scratch/packages"
# apt leaves its sandbox where it cannot write, with a warning: what it says matters only where it fails.
if ! apt-get download -qq "$@" 2>"$scratch/errors"; then
  cat "$scratch/errors" >&2
  echo "package-image.sh: $tag is not made: apt-get cannot download its packages; does \`apt-get update\` help?" >&2
  exit 1
fi
for package in *.deb; do
  dpkg-deb --extract "$package" "$scratch/root"
done
cd "$scratch/root"
# What the packages' scripts would do. Libraries of /lib are found below /usr, too, as in Debian itself.
mkdir -p usr/bin usr/sbin usr/lib usr/lib64
for dir in bin sbin lib lib64; do
  if [ -d "$dir" ] && [ ! -L "$dir" ]; then
    cp -a "$dir/." "usr/$dir/"
    rm -rf "$dir"
  fi
  ln -s "usr/$dir" "$dir"
done
mkdir -p etc/ssl/certs tmp root var/lib
chmod 1777 tmp
find usr/share/ca-certificates -name '*.crt' -exec cat {} + >etc/ssl/certs/ca-certificates.crt
printf 'root:x:0:0:root:/root:/usr/sbin/nologin\nmillrace:x:999:999::/var/lib/millrace:/usr/sbin/nologin\n' >etc/passwd
printf 'root:x:0:\nmillrace:x:999:\n' >etc/group
rm -rf usr/share/doc usr/share/man usr/share/locale usr/share/lintian usr/lib/x86_64-linux-gnu/gconv usr/lib/aarch64-linux-gnu/gconv
tar --numeric-owner --owner=0 --group=0 -c . | docker import -c 'ENV PATH=/usr/local/bin:/usr/bin:/usr/sbin' - "$tag" >/dev/null
echo "$tag is made"
