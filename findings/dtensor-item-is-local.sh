#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: item() of a DTensor of one number gives that number, on each rank the same, or
# raises, as tolist() does.
# What happens: where the sum over ranks is still pending (a Partial placement: what a sum, norm or
# maximum of a sharded tensor gives), item() and float() give the rank's own part without a word;
# any further operation gives the whole. So a logged norm is wrong and differs by rank, and a branch
# on it may take another way on each.
#     [1, 2, 3, 4] over two ranks: norm().item() is 2.236 and 5.000 of 5.477;
#     norm().pow(2).sqrt().item() is 5.477 on both
# (full_tensor() first gives the whole. clip_grad_norm_ of FSDP2 answers a replicated norm here, so
# its item() is right.)
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

cat >"$T/probe.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
sharded = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
norm = sharded.norm()
seen = [
    norm.item(),
    float(norm),
    norm.pow(2).sqrt().item(),
    norm.full_tensor().item(),
    sharded.sum().item(),
]
numbers = " ".join(f"{value:.3f}" for value in seen)
print(f"rank {dist.get_rank()}: {numbers}", norm.placements, flush=True)
part = (5**0.5, 25**0.5)[dist.get_rank()]
expected = [part, part, 30**0.5, 30**0.5, (3.0, 7.0)[dist.get_rank()]]
assert torch.allclose(torch.tensor(seen), torch.tensor(expected)), seen
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$T/venv/bin/torchrun" --standalone --nproc-per-node 2 "$T/probe.py"
