#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: all_reduce with MAX carries a NaN to all ranks, as torch.max does and as SUM
# does, so one MAX of a loss or an inf-norm is enough to see on each rank that some rank has a NaN.
# What happens: over gloo (CPU tensors: offloaded states, CPU tests) the first rank's NaN stays and
# the second rank's is lost, for MAX and MIN and all four types: a comparison with NaN is false, so
# the value that was there stays.
#     MAX: NaN on rank 0 gives nan, NaN on rank 1 gives 1.0
#     MIN: NaN on rank 0 gives nan, NaN on rank 1 gives 1.0
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

cat >"$T/probe.py" <<'PY'
import math

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for op in ("MAX", "MIN"):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        seen = []
        for bad in (0, 1):
            value = torch.tensor([math.nan if rank == bad else 1.0], dtype=dtype)
            dist.all_reduce(value, op=getattr(dist.ReduceOp, op))
            seen.append(value.item())
        if rank == 0 and dtype == torch.float32:
            print(f"{op}: NaN on rank 0 gives {seen[0]}, NaN on rank 1 gives {seen[1]}")
        assert math.isnan(seen[0]) and seen[1] == 1.0, (op, dtype, seen)
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$T/venv/bin/torchrun" --standalone --nproc-per-node 2 "$T/probe.py"
