#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: with bf16 and gradient accumulation the microbatches' gradients are summed in
# fp32, as Megatron-LM does with --bf16; so the same global batch in more microbatches trains the
# same.
# What happens: ZeRO-0, 1 and 2 sum in bf16, whose 8 bits lose what is under 1/256 of the sum. The
# more microbatches, the more is lost. `"data_types": {"grad_accum_dtype": "fp32"}` with ZeRO-1 sums
# in fp32.
#     2048, then 7 x 6, over 8 microbatches: mean 256 (stages 0, 1, 2), 262 with fp32 sums;
#     exact 261.25, in bf16 262
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


def step_taken(stage, **keys):
    """How far one step with lr 1 moves a weight: its mean gradient, in bf16 as the weight."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        **keys,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for gradient in [2048.0] + [6.0] * 7:
        engine.backward(engine(torch.tensor([[gradient]], dtype=torch.bfloat16)).sum())
        engine.step()
    return 0.0 - model.weight.item()


seen = [step_taken(stage) for stage in (0, 1, 2)]
in_fp32 = step_taken(1, data_types={"grad_accum_dtype": "fp32"})
print(f"seen {seen}, with fp32 sums {in_fp32}")
assert seen == [256.0] * 3
assert in_fp32 == 262.0
PY
DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
    "$T/venv/bin/torchrun" --standalone --nproc-per-node 1 "$T/probe.py"
