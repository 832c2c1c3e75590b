"""Models of transformers that are our shapes: their configurations and their names of our parameters.

The tables are in data/huggingface.json. Canonical names are megatron-core's.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trilane.config.model import ModelShape
from trilane.utils.validation import require, shipped_json

HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One class of models in transformers.

    model        the class; `base` is the name of its decoder, `layers` that of the list of layers in it
    fields       field of a shape -> the values that such models have, each with the keys that a configuration has then
    sizes        field or property of a shape -> key of the configuration
    settings     other keys that decide what is computed; their values here are transformers' defaults
    dropout      key of the configuration -> field of a plan's dropout
    names        canonical name, without the layer, `.weight` and `.bias` -> theirs; several for parts that are apart
    by_group     whether queries, keys and values are in the canonical order, not kind after kind
    transposed   whether linear layers hold (in, out)
    """

    model: str
    base: str
    layers: str
    fields: Mapping[str, Mapping[object, Mapping[str, object]]]
    sizes: Mapping[str, str]
    names: Mapping[str, str]
    dropout: Mapping[str, str]
    settings: Mapping[str, object] = field(default_factory=dict)
    by_group: bool = False
    transposed: bool = False

    def misfit(self, shape: ModelShape) -> tuple[str, object, str] | None:
        """The first field in which such models are unlike `shape`, its value and the rule; None where none is."""
        for name, known in self.fields.items():
            value = getattr(shape, name)
            if value not in known:
                has = ", ".join("the usual" if word is None else str(word) for word in known)
                return name, value, f"{self.model} has {has}"
        return None

    def config(self, shape: ModelShape) -> dict[str, Any]:
        """The configuration of a model of that shape, as JSON for from_pretrained; without dropout."""
        words = [known[getattr(shape, name)] for name, known in self.fields.items()]
        chosen = {key: value for word in words for key, value in word.items()}
        sizes = {theirs: getattr(shape, ours) for ours, theirs in self.sizes.items()}
        none = dict.fromkeys(self.dropout, 0.0)
        return {"architectures": [self.model], "torch_dtype": "float32", **self.settings, **none, **chosen, **sizes}

    def their_names(self, name: str) -> list[str]:
        """Their names of the canonical parameter `name`; ValueError where they have none."""
        if name == "output_layer.weight":
            return [HEAD]
        stem, _, end = name.rpartition(".")
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", stem)
        prefix, part = (f"{self.layers}.{found[1]}.", found[2]) if found else ("", stem)
        require(part in self.names, "parameter", name, f"{self.model} has none")
        return [f"{self.base}.{prefix}{n}.{end}" for n in self.names[part].split()]


@functools.cache
def families() -> dict[str, Family]:
    """The families by the type in a config.json. A shape is exported as the first that has it: none as a Mistral."""
    tables = shipped_json("huggingface")["families"]
    found = {}
    for kind, own in tables.items():
        table = {**tables.get(own.pop("like", ""), {}), **own}
        fields = {name: {value: keys for value, keys in known} for name, known in table.pop("fields").items()}
        found[kind] = Family(**table, fields=fields)
    return found


def family_of(shape: ModelShape) -> Family:
    """The first family that has `shape`; ValueError that names the field which those with its positions lack."""
    if misfit := misfit_of(shape):
        require(False, *misfit)
    return next(family for family in families().values() if not family.misfit(shape))


def misfit_of(shape: ModelShape) -> tuple[str, object, str] | None:
    """Why no family has `shape`: a field, its value and the rule; None where one has."""
    alike = [family for family in families().values() if shape.positions in family.fields["positions"]]
    misfits = [family.misfit(shape) for family in alike]
    if not alike:
        return "positions", shape.positions, "GPT-2 has learned ones, BLOOM alibi, Llama rotary"
    return misfits[0] if all(misfits) else None
