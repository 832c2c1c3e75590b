#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: torch.distributed.checkpoint refuses a tensor whose type is not the checkpoint's,
# as it refuses another shape or a missing key.
# What happens: load() casts without a word, in both directions and from fractions to whole numbers.
# Optimizer states saved in fp32 and loaded into a state dict that was built after model.bfloat16()
# lose 16 bits, and the next checkpoint holds those.
#     saved 1.001953125 in torch.float32; loaded: 1.0 in torch.bfloat16, 1 in torch.int64
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

cat >"$T/probe.py" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp

folder = sys.argv[1]
saved = torch.tensor([1 + 2**-9])  # bfloat16 has 8 bits
dcp.save({"exp_avg_sq": saved}, checkpoint_id=folder, no_dist=True)
seen = {}
for dtype in (torch.bfloat16, torch.int64):
    state = {"exp_avg_sq": torch.zeros(1, dtype=dtype)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    seen[dtype] = state["exp_avg_sq"].item()
loaded = ", ".join(f"{value} in {dtype}" for dtype, value in seen.items())
print(f"saved {saved.item()} in {saved.dtype}; loaded: {loaded}")
assert seen == {torch.bfloat16: 1.0, torch.int64: 1}
try:
    dcp.load({"exp_avg_sq": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
except dcp.CheckpointException as error:  # a BaseException
    assert "Size mismatch" in str(error), error
else:
    raise AssertionError("another shape is taken, too")
PY
"$T/venv/bin/python" -W ignore "$T/probe.py" "$T/checkpoint"
