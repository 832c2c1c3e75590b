#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: `"optimizer": {"type": "Adam"}` is Adam of Kingma and Ba, whose weight decay is
# an L2 term of the gradient, and `AdamW` the other; `"torch_adam": true` makes it torch.optim.Adam.
# What happens: both types are AdamW, because `adam_w_mode` is true where it is not given:
# torch.optim.AdamW with torch_adam. A run of another framework with Adam and weight decay, repeated
# with the same words, trains otherwise.
#     weight 1, gradient 0, lr 0.1, decay 0.5: Adam 0.95, AdamW 0.95, Adam with adam_w_mode
#     false 0.9
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 deepspeed==0.19.8

cat >"$T/probe.py" <<'PY'
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
deepspeed.init_distributed("gloo")


def weight_after_step(name, **params):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    params = {"lr": 0.1, "weight_decay": 0.5, "torch_adam": True, **params}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": params}}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    engine.backward(engine(torch.zeros(1, 1)).sum())
    engine.step()
    return round(model.weight.item(), 4), type(optimizer).__name__


seen = [
    weight_after_step("Adam"),
    weight_after_step("AdamW"),
    weight_after_step("Adam", adam_w_mode=False),
]
print(seen)
assert seen == [(0.95, "AdamW"), (0.95, "AdamW"), (0.9, "Adam")]
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
    "$T/venv/bin/torchrun" --standalone --nproc-per-node 1 "$T/probe.py"
