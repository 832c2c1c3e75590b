#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: a scheduler that was prepared moves one step for each scheduler.step(), so a
# warm-up counted in optimizer steps is right on any number of processes.
# What happens: it moves as many steps as there are processes (unless `split_batches`): on 2 a
# schedule over 8 steps ends after 4 optimizer steps, on 512 processes a warm-up of 2,000 within 4.
# A schedule counted in optimizer steps ends early, and the rest trains at its last rate.
#     2 processes, lr from 1 to 0 in 8 steps: after four optimizer steps 0.75 0.5 0.25 0.0
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 accelerate==1.15.0

cat >"$T/probe.py" <<'PY'
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
seen = []
for _ in range(4):
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    seen.append(scheduler.get_last_lr()[0])
accelerator.print("learning rates", seen)
assert seen == [0.75, 0.5, 0.25, 0.0]
accelerator.end_training()
PY
OMP_NUM_THREADS=1 "$T/venv/bin/torchrun" --standalone --nproc-per-node 2 "$T/probe.py"
