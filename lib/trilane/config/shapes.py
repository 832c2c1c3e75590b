"""A shape from outside: five numbers, a file of trilane, or a config.json of Hugging Face's
transformers.

Also the models of transformers that are such shapes, with their names of our parameters. The tables
are in data/huggingface.json. Canonical names are megatron-core's.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from trilane.config.model import ModelShape, padded_vocab_size, parse_shape
from trilane.config.options import Rules, first_broken
from trilane.utils.frozen import frozen
from trilane.utils.validation import (
    from_mapping,
    read_object,
    require,
    require_integer,
    require_known,
    shipped_json,
)


def read_shape(text: str | ModelShape, *, seq_length: int = 0) -> ModelShape:
    """The shape of five numbers (see parse_shape), or of a JSON file: a shape's fields, a plan, a
    config.json.

    `seq_length` above 0 takes the place of the one that it has. The vocabulary of five numbers and
    of a config.json is padded to a multiple of 128, as Megatron does; a file of trilane has rows
    that are padded already. Raises ValueError for what is no shape of a decoder.
    """
    shape = text if isinstance(text, ModelShape) else _named_shape(text, seq_length)
    return dataclasses.replace(shape, seq_length=seq_length or shape.seq_length)


def _named_shape(text: str, seq_length: int) -> ModelShape:
    if text.endswith(".json"):
        values = read_object(text, "shape")
        if "model_type" not in values:
            return from_mapping(ModelShape, values.get("shape", values), "shape")
        shape = shape_of_config(values, seq_length)
    else:
        shape = parse_shape(text)
    return dataclasses.replace(shape, vocab_size=padded_vocab_size(shape.vocab_size))


def shape_of_config(values: Mapping[str, Any], seq_length: int = 0) -> ModelShape:
    """The shape of a configuration of transformers, its vocabulary as it is; `seq_length` 0 takes
    the longest it has. Left out: what a type has beside it, such as OPT's two further positions and
    Granite's multipliers of values, which change no size.

    Raises ValueError with the name of the key or field for a type that is not known, for latent
    attention, layers of other kinds, attention beside the MLP, and windows shorter than the
    sequence. Left out: the loss that balances experts, which transformers adds only where asked.
    """
    tables = shipped_json("huggingface")
    kind = str(values["model_type"])
    usual = {**tables["usual"], **tables["configs"].get(kind, {})}
    dense = [] if "experts" in usual["keys"] else tables["dense"]
    for key, default, wanted, rule in [*tables["needs"], *dense, *usual["needs"]]:
        value = values.get(key, default)
        each = value if isinstance(value, list) else [value]
        for one in each:
            require(one in wanted, key, one, rule)
    rule = f"no decoder that a shape describes; known: {', '.join(sorted(tables['configs']))}"
    require(kind in tables["configs"], "model_type", kind, rule)
    # transformers 5 keeps what rotary positions need in an object of their own
    rotary = values.get("rope_parameters") or {}
    require(isinstance(rotary, Mapping), "rope_parameters", rotary, "must be a JSON object")
    values = {**values, **rotary}

    names = {field.name for field in dataclasses.fields(ModelShape)}
    given = {name: value for name, value in usual.items() if name in names}
    for name, keys in {**tables["keys"], **usual["keys"]}.items():
        for key in keys:
            if values.get(key) is not None:
                given[name] = values[key]
    if seq_length:
        given["seq_length"] = seq_length
    front = values.get("mlp_only_layers")  # those of Qwen's mixtures without experts
    if isinstance(front, list):
        given["first_dense"] = len(front)
    if values.get("norm_topk_prob"):
        given["router_pre_softmax"] = False
    activations = tables["gated" if usual["gated"] else "activations"]
    require_known("activation", str(given["activation"]), activations)
    given["activation"] = activations[given["activation"]]
    bias_keys = usual["bias_keys"]
    switches = {bool(values.get(key, usual["biases"] == "all")) for key in bias_keys}
    rule = "a shape has all or none of them"
    require(len(switches) < 2, "biases", " ".join(bias_keys), rule)
    if switches:
        given["biases"] = "all" if True in switches else "none"
    shape = from_mapping(ModelShape, given, "shape")

    wanted = {
        "word_embed_proj_dim": shape.hidden_size,
        "mlp_only_layers": [*range(shape.first_dense)],
        "no_rope_layers": [int(shape.has_rope(n + 1)) for n in range(shape.num_layers)],
    }
    for key, value in wanted.items():
        require(values.get(key) in (None, value), key, values.get(key), f"a shape has {value}")
    window = values.get("sliding_window")
    if window is not None and values.get("use_sliding_window", True):
        # a shape attends to the whole sequence
        require_integer("sliding_window", window, shape.seq_length)
    return shape


@frozen
class Family:
    """One class of models in transformers.

    model        the class
    fields       field of a shape -> the values that such models have, as text, each with the keys
                 that a configuration has then
    sizes        field or property of a shape -> key of the configuration
    dropout      key of the configuration -> field of a plan's dropout
    names        canonical name, {} for the layer, without `.weight` and `.bias` -> theirs; several
                 for parts that are apart
    by_group     whether queries, keys and values are in the canonical order, not kind after kind
    transposed   whether linear layers hold (in, out)
    """

    model: str
    fields: Mapping[str, Mapping[str, Mapping[str, object]]]
    sizes: Mapping[str, str]
    names: Mapping[str, str]
    dropout: Mapping[str, str]
    by_group: bool = False
    transposed: bool = False

    def rules(self, shape: ModelShape) -> Rules:
        """Which fields of `shape` such models have."""
        other = ""
        for name, keys_of in self.fields.items():
            rule = f"{self.model} has {', '.join(keys_of)}"
            value = str(getattr(shape, name))
            yield value in keys_of, name, rule
            if "architectures" in keys_of.get(value, ()):  # one class alone has it
                yield not other, name, f"no model of transformers has it and {other}"
                other = name

    def config(self, shape: ModelShape) -> dict[str, Any]:
        """The configuration of a model of that shape for from_pretrained; without dropout."""
        values: dict[str, Any] = {"architectures": [self.model], "torch_dtype": "float32"}
        values.update(dict.fromkeys(self.dropout, 0.0))
        for name, keys_of in self.fields.items():
            values.update(keys_of[str(getattr(shape, name))])
        for name, key in self.sizes.items():
            values[key] = getattr(shape, name)
        return values

    def their_names(self, name: str) -> list[str]:
        """Their names of the canonical parameter `name`."""
        part, _, end = name.rpartition(".")
        layer = re.findall(r"\.(\d+)\.", part)
        theirs = self.names[re.sub(r"\.\d+\.", ".{}.", part)]
        return [f"{word.format(*layer)}.{end}" for word in theirs.split()]


@functools.cache
def _family(positions: str) -> Family:
    tables = shipped_json("huggingface")["families"]
    return Family(**tables.get(positions, tables["learned"]))


@functools.cache
def _mixture(normed: bool) -> Family:
    """Of models with experts: those of Mixtral, with q and k norms of Qwen3-MoE. Each table has
    what differs from the one before.
    """
    tables = shipped_json("huggingface")
    values = dict(tables["families"]["rotary"])
    for table in tables["mixtures"][: 1 + normed]:
        for name, part in table.items():
            values[name] = values[name] | part if isinstance(part, dict) else part
    return Family(**values)


def nearest_family(shape: ModelShape) -> Family:
    """The family with the positions, or the experts, of `shape`; its rules() say whether it has the
    shape.
    """
    if shape.experts:
        return _mixture(shape.qk_layernorm)
    return _family(shape.positions)


def family_of(shape: ModelShape) -> Family:
    """The family that has `shape`; ValueError that names the first field in which it differs."""
    family = nearest_family(shape)
    if reason := first_broken(family.rules(shape), shape):
        raise ValueError(reason)
    return family
