#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: a Llama loaded with dtype=bfloat16 and one loaded in fp32 and moved by
# .to(torch.bfloat16) are the same model: their state dicts are equal to the bit.
# What happens: .to() rounds the rotary frequencies, a buffer that no state dict holds, to 8 bits;
# from_pretrained keeps them in fp32. The error of an angle grows with the position: at position
# 4,000 a cosine is off by 1.8. What was trained after .to() is then evaluated with other positions
# after from_pretrained, the worse the longer the text.
#     state dicts equal; largest difference of a cosine at positions 100, 1000, 4000: 0.12,
#     0.90, 1.78
# (DeepSpeed 0.19.8's bf16 mode leaves the buffer in fp32.)
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0

cat >"$T/probe.py" <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=32)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
loaded = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
moved = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).to(torch.bfloat16)
other = moved.state_dict()
assert all(torch.equal(value, other[name]) for name, value in loaded.state_dict().items())


def cosines(model, position):
    return model.model.rotary_emb(torch.zeros(1), torch.tensor([[position]]))[0]


seen = [(cosines(loaded, p) - cosines(moved, p)).abs().max().item() for p in (100, 1000, 4000)]
print("state dicts equal; cosines off by", seen)
assert [round(value, 2) for value in seen] == [0.12, 0.90, 1.78]
PY
"$T/venv/bin/python" "$T/probe.py" "$T/model"
