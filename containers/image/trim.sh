#!/bin/sh
# Run in an image that is being built: remove what no run needs, and what differs from build to build.
# docs/containers.md says what each group saves.
set -eu

packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib", "posix_local"))')

# Debian: documentation, translations, package lists.
find /usr/share/doc -mindepth 1 ! -type d ! -name copyright -delete
rm -rf /usr/share/man /usr/share/info /usr/share/locale /usr/share/javascript /usr/share/lintian
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/lib/dpkg/*-old

# Static libraries of CUDA, which are there for linking one's own programs.
find "$packages/nvidia" -name '*.a' -delete

# The packages' own tests.
rm -rf "$packages/torch/test"
find "$packages" -type d -name tests -path '*/site-packages/*' -prune -exec rm -rf {} +

# What tells of the machine or the minute.
rm -rf /var/log/* /var/tmp/* /tmp/* /root/.cache /var/cache/ldconfig/aux-cache /etc/machine-id
: >/etc/resolv.conf
echo localhost >/etc/hostname
rm -f /etc/apt/sources.list
# pip's note of where a package came from: the build's own folder.
find "$packages" -name direct_url.json -path '*apptrain*' -delete
