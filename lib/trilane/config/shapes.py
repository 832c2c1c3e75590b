"""A shape from outside: five numbers, a file of trilane, or a config.json of Hugging Face's
transformers.

Also the models of transformers that are such shapes, with their names of our parameters. The tables
are in data/huggingface.json. Canonical names are megatron-core's.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trilane.config.model import ModelShape, padded_vocab_size, parse_shape
from trilane.utils.validation import (
    from_mapping,
    read_json,
    require,
    require_integer,
    require_known,
    require_positive,
    shipped_json,
)


@dataclass(frozen=True, kw_only=True)
class GivenShape:
    """A shape, and what was decided where it was read: a line each."""

    shape: ModelShape
    notes: tuple[str, ...] = ()


def configs() -> list[str]:
    """The types of models whose configurations are known."""
    return sorted(shipped_json("huggingface")["configs"])


def read_shape(text: str | ModelShape, *, seq_length: int = 0, tp: int = 1) -> GivenShape:
    """The shape of five numbers (see parse_shape), of a JSON file (a shape's fields, a plan, a
    config.json), or of a folder with a config.json.

    `seq_length` above 0 takes the place of the one that it has. The vocabulary of five numbers and
    of a config.json is padded to a multiple of 128, as Megatron does, and of 128 x `tp` where that
    is needed; a file of trilane has rows that are padded already. Raises ValueError for what is no
    shape of a dense decoder.
    """
    if isinstance(text, ModelShape):
        return GivenShape(shape=_with_sequence(text, seq_length))
    path = Path(text) / "config.json" if (Path(text) / "config.json").is_file() else Path(text)
    values = read_json(path, "shape") if text.endswith(".json") or path.is_file() else None
    if values is None:
        given = GivenShape(shape=parse_shape(text))
    elif isinstance(values, dict) and "model_type" in values:
        given = shape_of_config(values, seq_length)
    else:
        own = values.get("shape", values) if isinstance(values, dict) else values
        return GivenShape(shape=_with_sequence(from_mapping(ModelShape, own, "shape"), seq_length))
    shape, notes = _with_sequence(given.shape, seq_length), given.notes
    rows = padded_vocab_size(shape.vocab_size)
    what = "128"
    if rows % tp:
        rows, what = padded_vocab_size(shape.vocab_size, tp), f"128 x tp = 128 x {tp}"
    if rows != shape.vocab_size:
        notes += (f"vocab_size={shape.vocab_size}: padded to {rows}, a multiple of {what}",)
    return GivenShape(shape=dataclasses.replace(shape, vocab_size=rows), notes=notes)


def _with_sequence(shape: ModelShape, seq_length: int) -> ModelShape:
    return dataclasses.replace(shape, seq_length=seq_length) if seq_length else shape


def shape_of_config(values: Mapping[str, Any], seq_length: int = 0) -> GivenShape:
    """The shape of a configuration of transformers, its vocabulary as it is; `seq_length` 0 takes
    the longest it has.

    Raises ValueError with the name of the key for a type that is not known, for experts, latent
    attention, attention beside the MLP, heads that do not make up the hidden size, and windows
    shorter than the sequence.
    """
    table, kind = shipped_json("huggingface"), str(values["model_type"])
    for key, rule in table[
        "refused"
    ].items():  # whatever the type; 0, 1 and null mean that there is none
        require(values.get(key) in (None, 0, 1), key, values.get(key), rule)
    require_known("model_type", kind, configs())
    usual, known = _usual(kind), _with_rotary(values)
    for key, value, is_allowed, rule in _unlike_a_shape(values, usual):
        require(is_allowed, key, value, rule)
    # an MLP of GPT-2 or BLOOM is 4 x hidden_size where they name none, as a shape's
    may_miss = (
        "num_key_value_heads",
        "seq_length",
        *["ffn_hidden_size"] * (kind in ("gpt2", "bloom")),
    )
    sizes: dict[str, Any] = {
        name: _size(values, keys, name not in may_miss) for name, keys in table["sizes"].items()
    }
    longest, sizes["seq_length"] = sizes["seq_length"], seq_length or sizes["seq_length"]
    require(
        sizes["seq_length"] is not None, "seq", "missing", "is not in the configuration; give it"
    )
    key, act = _first(values, table["keys"]["activation"], usual.act)
    acts = table["gated" if usual.gated else "activations"]
    require_known(key, act if isinstance(act, str) else usual.act, acts)
    numbers = {
        name: _first(known, table["keys"][name], None) for name in ("norm_epsilon", "rotary_base")
    }
    for key, value in (pair for pair in numbers.values() if pair[1] is not None):
        require_positive(key, value)
    shape = ModelShape(
        **sizes,
        activation=acts[act if isinstance(act, str) else usual.act],
        normalization=usual.normalization,
        positions="alibi" if values.get("alibi") else usual.positions,
        biases=_biases(values, usual),
        tied_embeddings=values.get("tie_word_embeddings", usual.tied) is not False,
        embedding_layernorm=usual.embedding_layernorm,
        norm_epsilon=float(numbers["norm_epsilon"][1] or usual.epsilon),
        rotary_base=float(numbers["rotary_base"][1] or ModelShape.rotary_base),
    )
    for key, own, rule in (
        ("head_dim", shape.head_dim, "a shape has hidden_size / num_attention_heads"),
        ("word_embed_proj_dim", shape.hidden_size, "a shape has an embedding of hidden_size"),
    ):
        require(values.get(key) in (None, own), key, values.get(key), f"{rule} = {own}")
    window, slides = (
        values.get("sliding_window", usual.window),
        values.get("use_sliding_window", usual.slides) is True,
    )
    ok = window is None or not slides or (isinstance(window, int) and window >= shape.seq_length)
    rule = f"a shape attends to the whole sequence, seq = {shape.seq_length}; give a shorter one"
    require(ok, "sliding_window", window, rule)
    notes = (
        []
        if seq_length
        else [f"seq={longest}: the longest of the configuration, as no other is given"]
    )
    notes += [f"model_type={kind}: {usual.note}"] * bool(usual.note)
    notes += _rotary_notes(known, usual) if shape.positions == "rotary" else []
    return GivenShape(shape=shape, notes=tuple(notes))


def _usual(kind: str) -> SimpleNamespace:
    """What all models of one type share, and their configuration's defaults; see
    data/huggingface.json.
    """
    tables = shipped_json("huggingface")
    return SimpleNamespace(**{**tables["usual"], **tables["configs"][kind]})


def _unlike_a_shape(
    values: Mapping[str, Any], usual: SimpleNamespace
) -> Iterator[tuple[str, object, bool, str]]:
    """What no shape can express: key, value, whether it is allowed, and the rule."""
    for key, default, needed, rule in usual.needs:
        yield key, values.get(key, default), values.get(key, default) == needed, rule
    for key in ("tie_word_embeddings", "use_sliding_window", "alibi"):
        yield (
            key,
            values.get(key),
            isinstance(values.get(key), bool | None),
            "must be true or false",
        )
    rule = f"a model of type {values['model_type']} has {usual.positions} positions"
    yield "alibi", "true", not values.get("alibi") or usual.positions == "alibi", rule
    for key in ("rope_theta", "rotary_emb_base", "rope_parameters"):
        yield key, values.get(key), not values.get(key) or usual.positions == "rotary", rule


def _first(values: Mapping[str, Any], keys: list[str], otherwise: Any) -> tuple[str, Any]:
    """The first of the keys that has a value, and the value; else the first key, and `otherwise`."""
    key = next((key for key in keys if values.get(key) is not None), None)
    return (key, values[key]) if key else (keys[0], otherwise)


def _size(values: Mapping[str, Any], keys: list[str], is_needed: bool) -> int | None:
    key, value = _first(values, keys, None)
    if value is not None:
        require_integer(key, value, 1)
    require(value is not None or not is_needed, key, "missing", "is not in the configuration")
    return value


def _with_rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with what it keeps in an object of its own for rotary positions
    (transformers 5).
    """
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    require(isinstance(nested, Mapping), "rope_parameters", nested, "must be an object")
    return {**values, **nested}


def _rotary_notes(known: Mapping[str, Any], usual: SimpleNamespace) -> list[str]:
    """Where the model turns a part of the channels alone, or by other angles than a shape."""
    _, share = _first(
        known, shipped_json("huggingface")["keys"]["rotary_share"], usual.rotary_share
    )
    kind = known.get("rope_type", known.get("type", "default"))
    notes = [f"partial_rotary_factor={share}: a shape turns all channels of a head"] * (share != 1)
    return notes + [f"rope_type={kind}: a shape has angles as they are"] * (kind != "default")


def _biases(values: Mapping[str, Any], usual: SimpleNamespace) -> str:
    given = {key: values.get(key, usual.biases == "all") for key in usual.bias_keys}
    words = ", ".join(f"{key}={str(value).lower()}" for key, value in given.items())
    require(
        len(set(map(str, given.values()))) < 2, "biases", words, "a shape has all or none of them"
    )
    return usual.biases if not given else "all" if next(iter(given.values())) is True else "none"


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
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    by_group: bool = False
    transposed: bool = False

    def misfit(self, shape: ModelShape) -> tuple[str, object, str] | None:
        """The first field in which such models are unlike `shape`, its value and the rule; None
        where none is.
        """
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
        return {
            "architectures": [self.model],
            "torch_dtype": "float32",
            **self.settings,
            **none,
            **chosen,
            **sizes,
        }

    def their_names(self, name: str) -> list[str]:
        """Their names of the canonical parameter `name`; ValueError where they have none."""
        if name == "output_layer.weight":
            return ["lm_head.weight"]
        stem, _, end = name.rpartition(".")
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", stem)
        prefix, part = (f"{self.layers}.{found[1]}.", found[2]) if found else ("", stem)
        require(part in self.names, "parameter", name, f"{self.model} has none")
        return [f"{self.base}.{prefix}{n}.{end}" for n in self.names[part].split()]


@functools.cache
def families() -> dict[str, Family]:
    """The families by the type in a config.json. A shape is exported as the first that has it."""
    tables = shipped_json("huggingface")["families"]
    found = {}
    for kind, own in tables.items():
        table = {**tables.get(own.pop("like", ""), {}), **own}
        fields = {
            name: {value: keys for value, keys in known}
            for name, known in table.pop("fields").items()
        }
        found[kind] = Family(**table, fields=fields)
    return found


def family_of(shape: ModelShape) -> Family:
    """The first family that has `shape`; ValueError that names the field which those with its
    positions lack.
    """
    if misfit := misfit_of(shape):
        require(False, *misfit)
    return next(family for family in families().values() if not family.misfit(shape))


def misfit_of(shape: ModelShape) -> tuple[str, object, str] | None:
    """Why no family has `shape`: a field, its value and the rule; None where one has."""
    alike = [
        family for family in families().values() if shape.positions in family.fields["positions"]
    ]
    misfits = [family.misfit(shape) for family in alike]
    if not alike:
        return "positions", shape.positions, "GPT-2 has learned ones, BLOOM alibi, Llama rotary"
    return misfits[0] if all(misfits) else None
