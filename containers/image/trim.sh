#!/bin/sh
# Run in an image that is being built: remove what no run needs, and what differs from build to
# build. docs/containers.md says what each group saves.
set -eu

# Removes what find prints for these arguments, and says what that saves.
drop() {
    what=$1
    shift
    find "$@" -print0 2>/dev/null | sort -z >/root/dropped
    bytes=$(du -cbs --files0-from=/root/dropped 2>/dev/null | tail -n 1 | cut -f 1)
    xargs -0 -r rm -rf -- </root/dropped
    rm /root/dropped
    echo "apptrain: build: removed $((bytes / 1000000)) MB: $what"
}

packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib", "posix_local"))')

drop "Debian's documentation, translations and package lists" \
    /usr/share/doc/*/* /usr/share/man /usr/share/info /usr/share/locale /usr/share/javascript \
    /usr/share/lintian /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old \
    /var/lib/dpkg/*-old -prune ! -name copyright
drop "static libraries, for linking programs of one's own" \
    "$packages/nvidia" "$packages/triton" -name '*.a'
drop "NVSHMEM for kernels of one's own" "$packages/nvidia" -name 'libnvshmem_device*.bc'
drop "a solver for several GPUs that torch does not load" \
    "$packages/nvidia" -name 'libcusolverMg.so*'
drop "Triton's compiler for AMD's GPUs" "$packages/triton/backends/amd" -name '*.so'
drop "the compiler of protocol buffers" "$packages/torch/bin" -name 'protoc*'
cd "$packages"
drop "tests of packages" matplotlib mpmath networkx numpy sympy -type d -name tests -prune

# What tells of the machine or the minute.
rm -rf /var/log/* /root/.cache /var/cache/ldconfig/aux-cache /etc/machine-id
rm -f /etc/apt/sources.list
