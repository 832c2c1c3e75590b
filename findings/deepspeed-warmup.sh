#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: WarmupLR (WarmupDecayLR likewise) raises the learning rate in a straight line
# over `warmup_num_steps`, as Megatron-LM and transformers do: with 10,000 steps it stands at 1 %
# after 100.
# What happens: it grows with log(step) / log(warmup_num_steps), so half of the peak is there after
# 100 of 10,000 steps, and the first two steps train with 0. A warm-up ten times as long hardly
# protects the first hundred steps. `"warmup_type": "linear"` is the line.
#     steps 1, 2, 3, 11, 101: 0, 0, 0.075, 0.25, 0.5 of the peak
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


def steps_taken(**params):
    """By how far each step moved a weight whose gradient is 1: the learning rate in force."""
    model = torch.nn.Linear(1, 1, bias=False)
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 10_000, **params}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    taken = []
    for _ in range(101):
        torch.nn.init.zeros_(model.weight)
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        taken.append(round(0.0 - model.weight.item(), 3))
    return [taken[step - 1] for step in (1, 2, 3, 11, 101)]


seen = steps_taken()
straight = steps_taken(warmup_type="linear")
print("default", seen, "linear", straight)
assert seen == [0.0, 0.0, 0.075, 0.25, 0.5]
assert straight == [0.0, 0.0, 0.0, 0.001, 0.01]
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
    "$T/venv/bin/torchrun" --standalone --nproc-per-node 1 "$T/probe.py"
