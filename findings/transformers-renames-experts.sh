#!/usr/bin/env bash
# transformers 5.24.0, Linux x86_64, Python 3.10 or newer, no GPU, no torch; seen 2026-11-30 on
# Python 3.11.
#
# One would guess: a configuration that is read and saved again has the keys that it had.
# What happens: of a mixture of experts the key depends on the model's type. Qwen3-MoE is published
# with num_experts and saved with num_local_experts; OLMoE and Qwen2-MoE keep num_experts, Mixtral
# num_local_experts. Who looks for the published key takes a saved Qwen3-MoE for a dense model.
#     qwen3_moe ['num_local_experts']
#     olmoe ['num_experts']
#     qwen2_moe ['num_experts']
#     mixtral ['num_local_experts']
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile transformers==5.24.0

cat >"$T/probe.py" <<'PY'
import json
import sys
from pathlib import Path

from transformers import AutoConfig

KEYS = {
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "qwen2_moe": "num_experts",
    "mixtral": "num_local_experts",
}
seen = {}
for kind, key in KEYS.items():
    folder = Path(sys.argv[1]) / kind
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, key: 16}))
    AutoConfig.from_pretrained(folder).save_pretrained(folder / "saved")
    saved = json.loads((folder / "saved/config.json").read_text())
    seen[kind] = [name for name in ("num_experts", "num_local_experts") if saved.get(name) == 16]
    print(kind, seen[kind])
expected = {kind: [key] for kind, key in KEYS.items()} | {"qwen3_moe": ["num_local_experts"]}
assert seen == expected
PY
"$T/venv/bin/python" "$T/probe.py" "$T/model" 2>/dev/null
