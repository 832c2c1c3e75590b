#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: a pipeline clips by the norm of all stages' gradients, whatever the ZeRO stage;
# one process and ZeRO-1 do.
# What happens: with ZeRO-0 in fp32 (a config without `zero_optimization`) the norm holds the first
# stage's gradients alone, because the parameters of later stages are not marked as model-parallel.
# Nothing is said, and where the pipeline is cut changes the steps.
#     gradients 3 and 4 (norm 5), clip 1, lr 1: steps 0.6 and 0.8 with ZeRO-1, 1.0 and 1.333
#     with ZeRO-0
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 deepspeed==0.19.8

cat >"$T/probe.py" <<'PY'
import deepspeed
import torch
from deepspeed.pipe import PipelineModule

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()


def step_taken(stage):
    """How far one step with lr 1 moves the weight of this process's stage."""
    layers = [torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)]
    torch.nn.init.constant_(layers[0].weight, 4.0)  # the gradient of the other
    torch.nn.init.constant_(layers[1].weight, 3.0)
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, label: (out - label).sum())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    (weight,) = model.parameters()
    before = weight.item()
    engine.train_batch(iter([(torch.ones(1, 1), torch.zeros(1, 1))] * 2))
    return round(before - weight.item(), 3)


seen = {stage: step_taken(stage) for stage in (0, 1)}
print(f"pipeline stage {rank}: ZeRO-0 {seen[0]}, ZeRO-1 {seen[1]}", flush=True)
assert seen == ({0: 1.0, 1: 0.6}, {0: 1.333, 1: 0.8})[rank]
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
    "$T/venv/bin/torchrun" --standalone --nproc-per-node 2 "$T/probe.py"
