#!/usr/bin/env bash
# nvidia-resiliency-ext 0.7.0 and 0.4.1, wheels for CPython 3.12 on Linux x86_64, read by any pip;
# seen 2026-11-28.
#
# One would guess: `pip install nvidia-resiliency-ext` takes the newest release, or says why not.
# megatron-core 0.17.1 to 0.19.2 pin 0.6.0 in [dev].
# What happens: from 0.5 on the only wheels are for glibc 2.39 (Ubuntu 24.04) and there is no source
# archive, so on RHEL 9 (2.34) and Debian 12 (2.36) pip installs 0.4.1, of an older interface,
# without a word, and a pin of 0.5 or newer finds nothing.
#     glibc 2.39: 0.7.0; older glibc: 0.4.1
# Exit 1 where this changes: releases after 0.7.0 are left out, so what changes is the index, or
# pip.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT

newest() {
    "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
        "$@" -d "$T" 'nvidia-resiliency-ext<=0.7.0'
    for wheel in "$T"/*.whl; do
        basename "$wheel" | cut -d- -f2
    done
    rm "$T"/*.whl
}
# What pip on glibc 2.36 takes (packaging's tags): each manylinux from 2_36 down
older=()
for minor in $(seq 36 -1 17); do
    older+=(--platform "manylinux_2_${minor}_x86_64")
done
on_new=$(newest --platform manylinux_2_39_x86_64)
on_old=$(newest "${older[@]}")
echo "glibc 2.39: $on_new; older glibc: $on_old"
[ "$on_new" = 0.7.0 ]
[ "$on_old" = 0.4.1 ]
