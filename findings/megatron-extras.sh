#!/usr/bin/env bash
# megatron-core 0.17.1, 0.18.2 and 0.19.2, wheels for CPython 3.12 on Linux x86_64, read by any pip;
# seen 2026-11-28.
#
# One would guess: `pip install megatron-core[dev]` brings Transformer Engine, as it did up to
# 0.17.1, and [lts] the same for older stacks.
# What happens: from 0.18 on [dev] does not name Transformer Engine any more (an extra [te] does),
# and [lts] is still there but empty, so pip installs nothing for it and does not even warn, as it
# does for an extra that is not known.
#     0.17.1: te in dev yes, lts 16 lines; 0.18.2: te in dev no, lts 0 lines; 0.19.2: te in
#     dev no, lts 0 lines
# Exit 1 where this changes (each version by its pin: what changes is the index, or pip).
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT

for version in 0.17.1 0.18.2 0.19.2; do
    "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 -d "$T" "megatron-core==$version"
done
cat >"$T/probe.py" <<'PY'
import pathlib
import sys
import zipfile
from email.parser import Parser

seen = {}
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    lines = metadata.get_all("Requires-Dist")
    dev = any("transformer-engine" in line and 'extra == "dev"' in line for line in lines)
    lts = sum('extra == "lts"' in line for line in lines)
    assert "lts" in metadata.get_all("Provides-Extra")
    seen[metadata["Version"]] = (dev, lts)
print("version: (Transformer Engine in [dev], lines of [lts])", seen)
assert seen["0.17.1"][0] and seen["0.17.1"][1] > 10
assert seen["0.18.2"] == seen["0.19.2"] == (False, 0)
PY
"${PYTHON:-python3}" "$T/probe.py" "$T"
