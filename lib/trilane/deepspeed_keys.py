"""The keys that DeepSpeed reads from its JSON: it takes no notice of a misspelt one outside its ZeRO block."""

import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

# Of Adam and AdamW, what DeepSpeed's engine (_configure_basic_optimizer) or the optimizers that it may choose take.
ADAM = (
    "adam_w_mode",
    "amsgrad",
    "betas",
    "bias_correction",
    "eps",
    "fp32_optimizer_states",
    "lr",
    "max_grad_norm",
    "set_grad_none",
    "torch_adam",
    "weight_decay",
)


@functools.cache
def known_keys() -> dict[str, list[str]]:
    """The keys of each block, by its dotted name, "" for the outermost; a block that is not here holds what it may."""
    text = resources.files("trilane").joinpath("data/deepspeed_keys.json").read_text(encoding="utf-8")
    return json.loads(text)["keys"]


def unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """A line for each key that DeepSpeed does not know, with the nearest that it does."""
    blocks = dict(known_keys())
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping) and str(optimizer.get("type", "AdamW")).lower() in ("adam", "adamw"):
        blocks["optimizer.params"] = list(ADAM)
    return _unknown(values, "", blocks)


def _unknown(values: Mapping[str, Any], block: str, blocks: Mapping[str, list[str]]) -> list[str]:
    lines = []
    for key, value in values.items():
        name = f"{block}.{key}" if block else key
        if key not in blocks[block]:
            close = difflib.get_close_matches(str(key), blocks[block], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            lines.append(f"{name}={_short(value)}: DeepSpeed has no such key{hint}")
        elif name in blocks and isinstance(value, Mapping):
            lines += _unknown(value, name, blocks)
        elif name in blocks and value is not None:
            lines.append(f"{name}={_short(value)}: must be a JSON object")
    return lines


def _short(value: object) -> str:
    return "{...}" if isinstance(value, Mapping) else str(value)
