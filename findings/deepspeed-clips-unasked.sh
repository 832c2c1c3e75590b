#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: without `gradient_clipping` nothing is clipped, as in torch; and a key that
# DeepSpeed does not know, such as a misspelt one, is refused, as it refuses unknown keys one level
# down.
# What happens: without the key gradients are clipped to norm 1.0, and unknown keys at the top are
# ignored without a word. So `gradient_cliping: 0` clips at 1.0, and `zero_optimisation` trains
# without ZeRO, while `{"zero_optimization": {"stag": 1}}` raises.
#     gradient 10, lr 1: weight -10.0 with gradient_clipping 0, -1.0 without the key, -1.0
#     with gradient_cliping 0
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


def weight_after_step(**keys):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        **keys,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    engine.backward(engine(torch.tensor([[10.0]])).sum())
    engine.step()
    return round(model.weight.item(), 3), engine.zero_optimization_stage()


asked = weight_after_step(gradient_clipping=0.0)
unasked = weight_after_step()
misspelt = weight_after_step(gradient_cliping=0.0, zero_optimisation={"stage": 1})
print(f"asked for none {asked}, key left out {unasked}, misspelt {misspelt} (weight, ZeRO stage)")
assert (asked, unasked, misspelt) == ((-10.0, 0), (-1.0, 0), (-1.0, 0))
try:
    weight_after_step(zero_optimization={"stag": 1})
except ValueError as error:
    assert "Extra inputs are not permitted" in str(error), error
else:
    raise AssertionError("a nested key is ignored, too")
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
    "$T/venv/bin/torchrun" --standalone --nproc-per-node 1 "$T/probe.py"
