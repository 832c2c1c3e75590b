#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on
# Python 3.11.
#
# One would guess: `LlamaConfig(dtype=torch.bfloat16)` builds a bfloat16 model by each of the ways
# that take a config.
# What happens: AutoModelForCausalLM.from_config follows the config; the class's constructor, which
# training from scratch calls, builds fp32 without a word, twice the memory; and save_pretrained
# then writes float32 over what the config said.
#     config bfloat16: from_config bfloat16, constructor float32, its saved config float32
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 transformers==5.24.0

cat >"$T/probe.py" <<'PY'
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def config():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaConfig(**sizes, num_attention_heads=2, vocab_size=32, dtype=torch.bfloat16)


folder = pathlib.Path(sys.argv[1])
built = LlamaForCausalLM(config())
built.save_pretrained(folder)
saved = json.loads((folder / "config.json").read_text())["dtype"]
seen = [AutoModelForCausalLM.from_config(config()).dtype, built.dtype, saved]
print(f"config {config().dtype}: from_config {seen[0]}, constructor {seen[1]}, saved {saved}")
assert seen == [torch.bfloat16, torch.float32, "float32"]
PY
"$T/venv/bin/python" "$T/probe.py" "$T/model"
