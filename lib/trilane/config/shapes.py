"""A shape from outside: five numbers, a file of trilane, or a config.json of Hugging Face's
transformers.

Also the models of transformers that are such shapes, with their names of our parameters. The tables
are in data/huggingface.json. Canonical names are megatron-core's.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.model import ModelShape, padded_vocab_size, parse_shape
from trilane.utils.validation import (
    from_mapping,
    read_object,
    require,
    require_integer,
    require_known,
    require_positive,
    shipped_json,
)


def read_shape(text: str | ModelShape, *, seq_length: int = 0) -> ModelShape:
    """The shape of five numbers (see parse_shape), of a JSON file (a shape's fields, a plan, a
    config.json), or of a folder with a config.json.

    `seq_length` above 0 takes the place of the one that it has. The vocabulary of five numbers and
    of a config.json is padded to a multiple of 128, as Megatron does; a file of trilane has rows
    that are padded already. Raises ValueError for what is no shape of a dense decoder.
    """
    shape = text if isinstance(text, ModelShape) else _named_shape(text, seq_length)
    if seq_length:
        return dataclasses.replace(shape, seq_length=seq_length)
    return shape


def _named_shape(text: str, seq_length: int) -> ModelShape:
    path = Path(text)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if text.endswith(".json") or path.is_file():
        values = read_object(path, "shape")
        if "model_type" not in values:
            return from_mapping(ModelShape, values.get("shape", values), "shape")
        shape = shape_of_config(values, seq_length)
    else:
        shape = parse_shape(text)
    return dataclasses.replace(shape, vocab_size=padded_vocab_size(shape.vocab_size))


def shape_of_config(values: Mapping[str, Any], seq_length: int = 0) -> ModelShape:
    """The shape of a configuration of transformers, its vocabulary as it is; `seq_length` 0 takes
    the longest it has. Left out: what a type has beside it, such as OPT's two further positions and
    Qwen 3's norms of queries and keys.

    Raises ValueError with the name of the key for a type that is not known, for experts, latent
    attention, attention beside the MLP, heads that do not make up the hidden size, and
    windows shorter than the sequence.
    """
    tables = shipped_json("huggingface")
    kind = str(values["model_type"])
    for key, rule in tables["refused"].items():  # whatever the type
        require(values.get(key) in (None, 0, 1), key, values.get(key), rule)
    require_known("model_type", kind, tables["configs"])
    usual = {**tables["usual"], **tables["configs"][kind]}
    for key, default, needed, rule in usual["needs"]:
        value = values.get(key, default)
        require(value == needed, key, value, rule)
    # transformers 5 keeps what rotary positions need in an object of their own
    rotary = values.get("rope_parameters") or values.get("rope_scaling") or {}
    require(isinstance(rotary, Mapping), "rope_parameters", rotary, "must be a JSON object")
    values = {**values, **rotary}

    sizes = {name: _size(values, name, keys) for name, keys in tables["sizes"].items()}
    if seq_length:
        sizes["seq_length"] = seq_length
    activations = tables["gated" if usual["gated"] else "activations"]
    key, activation = _first(values, tables["keys"]["activation"], usual["act"])
    require_known(key, str(activation), activations)
    epsilon_key, epsilon = _first(values, tables["keys"]["norm_epsilon"], usual["epsilon"])
    require_positive(epsilon_key, epsilon)
    base_key, base = _first(values, tables["keys"]["rotary_base"], ModelShape.rotary_base)
    require_positive(base_key, base)
    shape = ModelShape(
        **sizes,  # type: ignore[arg-type]
        activation=activations[activation],
        normalization=usual["normalization"],
        positions=usual["positions"],
        biases=_biases(values, usual),
        tied_embeddings=values.get("tie_word_embeddings", usual["tied"]) is not False,
        embedding_layernorm=usual["embedding_layernorm"],
        norm_epsilon=float(epsilon),
        rotary_base=float(base),
    )
    _require_plain(values, shape)
    return shape


def _first(values: Mapping[str, Any], keys: list[str], otherwise: Any) -> tuple[str, Any]:
    """The first key that has a value, and the value; else the first key, and `otherwise`."""
    for key in keys:
        if values.get(key) is not None:
            return key, values[key]
    return keys[0], otherwise


def _size(values: Mapping[str, Any], name: str, keys: list[str]) -> int | None:
    key, size = _first(values, keys, None)
    if size is not None:
        require_integer(key, size, 1)
    # GPT-2 and BLOOM name no width of an MLP of 4 x hidden_size
    may_miss = name in ("ffn_hidden_size", "num_key_value_heads")
    require(size is not None or may_miss, key, "missing", "is not in the configuration")
    return size


def _biases(values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """`biases` of a shape, by the keys that turn them on and off."""
    usually = usual["biases"] == "all"
    keys = usual["bias_keys"]
    if not keys:
        return usual["biases"]
    kinds = {values.get(key, usually) for key in keys}
    require(len(kinds) == 1, "biases", " ".join(keys), "a shape has all or none of them")
    return "all" if True in kinds else "none"


def _require_plain(values: Mapping[str, Any], shape: ModelShape) -> None:
    """ValueError for heads or embeddings of a width of their own, and for windows."""
    widths = {"head_dim": shape.head_dim, "word_embed_proj_dim": shape.hidden_size}
    for key, width in widths.items():
        require(values.get(key) in (None, width), key, values.get(key), f"a shape has {width}")
    window = values.get("sliding_window")
    if window is not None and values.get("use_sliding_window", True):
        # a shape attends to the whole sequence
        require_integer("sliding_window", window, shape.seq_length)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One class of models in transformers.

    model        the class; `base` names its decoder, `layers` the list of layers in it
    fields       field of a shape -> the values that such models have, each with
                 the keys that a configuration has then
    sizes        field or property of a shape -> key of the configuration
    settings     other keys that decide what is computed, at transformers' defaults
    dropout      key of the configuration -> field of a plan's dropout
    names        canonical name, without the layer, `.weight` and `.bias` -> theirs; several for
                 parts that are apart
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
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    by_group: bool = False
    transposed: bool = False

    def misfit(self, shape: ModelShape) -> tuple[str, object, str] | None:
        """The first field in which such models are unlike `shape`, its value and the rule; None
        where none is.
        """
        for name, keys_of in self.fields.items():
            value = getattr(shape, name)
            if value not in keys_of:
                return name, value, f"{self.model} has {', '.join(map(str, keys_of))}"
        return None

    def config(self, shape: ModelShape) -> dict[str, Any]:
        """The configuration of a model of that shape for from_pretrained; without dropout."""
        values: dict[str, Any] = {"architectures": [self.model], "torch_dtype": "float32"}
        values.update(self.settings)
        values.update(dict.fromkeys(self.dropout, 0.0))
        for name, keys_of in self.fields.items():
            values.update(keys_of[getattr(shape, name)])
        for name, key in self.sizes.items():
            values[key] = getattr(shape, name)
        return values

    def their_names(self, name: str) -> list[str]:
        """Their names of the canonical parameter `name`; ValueError where they have none."""
        if name == "output_layer.weight":
            return ["lm_head.weight"]
        part, _, end = name.rpartition(".")
        prefix = self.base
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", part)
        if match:
            prefix = f"{self.base}.{self.layers}.{match[1]}"
            part = match[2]
        require(part in self.names, "parameter", name, f"{self.model} has none")
        return [f"{prefix}.{theirs}.{end}" for theirs in self.names[part].split()]


@functools.cache
def families() -> dict[str, Family]:
    """The families by the type in a config.json. A shape is exported as the first that has it."""
    tables = shipped_json("huggingface")["families"]
    by_type = {}
    for kind, table in tables.items():
        values = {**tables.get(table.get("like"), {}), **table}
        values.pop("like", None)
        values["fields"] = {name: dict(pairs) for name, pairs in values["fields"].items()}
        by_type[kind] = Family(**values)
    return by_type


def family_of(shape: ModelShape) -> Family:
    """The first family that has `shape`; ValueError that names the field which those with its
    positions lack.
    """
    misfit = misfit_of(shape)
    if misfit:
        raise ValueError("{}={}: {}".format(*misfit))
    return next(family for family in families().values() if not family.misfit(shape))


def misfit_of(shape: ModelShape) -> tuple[str, object, str] | None:
    """Why no family has `shape`: a field, its value and the rule; None where one has."""
    misfits = [family.misfit(shape) for family in families().values()]
    if None in misfits:
        return None
    # of a family with other positions these are the first misfit
    return next((misfit for misfit in misfits if misfit and misfit[0] != "positions"), misfits[0])
