#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: Mixtral's load-balancing loss (and Qwen3-MoE's) is that of Switch
# (arXiv:2101.03961, equation 4): one for each layer, 1 where experts are used evenly, as
# Megatron-LM computes it, so that its coefficient can be carried over.
# What happens: tokens of all layers are pooled before the fractions are taken, so layers that each
# use two of eight experts only, but not the same two, count as balanced; and its least value is
# top_k for the whole model, not 1 for each layer: a coefficient cannot be carried over.
#     8 experts, top 2: even use 2.0; four layers, each on its own pair of experts, 2.0; one
#     of these layers alone 8.0
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0

cat >"$T/probe.py" <<'PY'
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as qwen3

TOKENS, EXPERTS, TOP_K = 64, 8, 2


def logits(pairs):
    """Token t chooses the two experts of pair t, all but surely."""
    chosen = torch.full((TOKENS, EXPERTS), -50.0)
    for token, pair in enumerate(pairs):
        chosen[token, 2 * pair : 2 * pair + 2] = 50.0
    return chosen


even = logits([token % 4 for token in range(TOKENS)])
collapsed = tuple(logits([layer] * TOKENS) for layer in range(4))
models = ((even,) * 4, collapsed, collapsed[:1])
for loss in (mixtral, qwen3):
    seen = [loss(layers, EXPERTS, TOP_K).item() for layers in models]
    print(f"{loss.__module__}: even {seen[0]}, four collapsed {seen[1]}, one of these {seen[2]}")
    assert seen == [2.0, 2.0, 8.0]
PY
"$T/venv/bin/python" "$T/probe.py"
