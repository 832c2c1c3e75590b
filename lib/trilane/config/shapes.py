"""A shape from outside: five numbers, a file of trilane, or a config.json of Hugging Face's transformers."""

import dataclasses
from collections.abc import Mapping
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


def _usual(kind: str) -> SimpleNamespace:
    """What all models of one type share, and their configuration's defaults; see data/huggingface.json."""
    tables = shipped_json("huggingface")
    return SimpleNamespace(**{**tables["usual"], **tables["configs"][kind]})


def read_shape(text: str, *, seq_length: int = 0, tp: int = 1) -> GivenShape:
    """The shape of five numbers (see parse_shape), of a JSON file (a shape's fields, a plan, a config.json), or of a
    folder with a config.json.

    `seq_length` above 0 takes the place of the one that it has. The vocabulary of five numbers and of a config.json is
    padded to a multiple of 128, as Megatron does, and of 128 x `tp` where that is needed; a file of trilane has rows
    that are padded already. Raises ValueError for what is no shape of a dense decoder.
    """
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
    """The shape of a configuration of transformers, its vocabulary as it is; `seq_length` 0 takes the longest it has.

    Raises ValueError with the name of the key for a type that is not known, for experts, latent attention, attention
    beside the MLP, heads that do not make up the hidden size, and windows shorter than the sequence.
    """
    for key, rule in shipped_json("huggingface")[
        "refused"
    ].items():  # whatever the type; 0, 1 and null mean that there is none
        require(values.get(key) in (None, 0, 1), key, values.get(key), rule)
    kind = str(values["model_type"])
    require_known("model_type", kind, configs())
    usual = _usual(kind)
    for key, default, needed, rule in usual.needs:
        require(values.get(key, default) == needed, key, values.get(key, default), rule)
    for key in ("tie_word_embeddings", "use_sliding_window", "multi_query", "alibi"):
        value = values.get(key)
        require(value is None or isinstance(value, bool), key, value, "must be true or false")
    sizes = _sizes(values, kind)
    longest, sizes["seq_length"] = sizes["seq_length"], seq_length or sizes["seq_length"]
    require(sizes["seq_length"] is not None, "seq", "missing", "is not in the configuration; give it")
    positions = _positions(values, usual)
    shape = ModelShape(
        **sizes,
        activation=_activation(values, usual),
        normalization=usual.normalization,
        positions=positions,
        biases=_biases(values, usual),
        tied_embeddings=values.get("tie_word_embeddings", usual.tied) is not False,
        embedding_layernorm=usual.embedding_layernorm,
        norm_epsilon=_number(
            values,
            ("layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"),
            usual.epsilon,
        ),
        rotary_base=_number(values, ("rope_theta", "rotary_emb_base"), ModelShape.rotary_base),
    )
    _require_plain_attention(values, usual, shape)
    notes = [] if seq_length else [f"seq={longest}: the longest of the configuration, as no other is given"]
    notes += [f"model_type={kind}: {usual.note}"] * bool(usual.note)
    turned = rotary_departures(values) if shape.positions == "rotary" else []
    return GivenShape(shape=shape, notes=(*notes, *(f"{key}={value}: {rule}" for key, value, rule in turned)))


def _sizes(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The sizes by a shape's names, each under the first of its names in transformers that has a value; else None."""
    names: dict[str, list[str]] = shipped_json("huggingface")["sizes"]
    given = {name: next((key for key in keys if values.get(key) is not None), None) for name, keys in names.items()}
    for key in filter(None, given.values()):
        require_integer(key, values[key], 1)
    sizes: dict[str, Any] = {name: int(values[key]) if key else None for name, key in given.items()}
    if kind == "falcon" and values.get("multi_query", True):
        sizes["num_key_value_heads"] = 1
    needed = ["num_layers", "hidden_size", "num_attention_heads", "vocab_size"]
    # the usual MLP of these is 4 h, as a shape's
    needed += ["ffn_hidden_size"] * (kind not in ("gpt2", "bloom", "falcon"))
    for name in needed:
        require(sizes[name] is not None, names[name][0], "missing", "is not in the configuration")
    return sizes


def _positions(values: Mapping[str, Any], usual: SimpleNamespace) -> str:
    """Those of the type, but where Falcon chooses ALiBi; ValueError for two kinds at once."""
    alibi, kind = values.get("alibi") is True, values["model_type"]
    rule = f"a model of type {kind} has {usual.positions} positions"
    require(not alibi or usual.positions == "alibi" or kind == "falcon", "alibi", "true", rule)
    given = next((key for key in ("rope_theta", "rotary_emb_base", "rope_parameters") if values.get(key)), "")
    require(not given or usual.positions == "rotary", given, values.get(given), rule)
    return "alibi" if alibi else usual.positions


def rotary_departures(values: Mapping[str, Any]) -> list[tuple[str, object, str]]:
    """Where the model turns a part of the channels alone, or by other angles than a shape: key, value and rule."""
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    require(isinstance(nested, Mapping), "rope_parameters", nested, "must be an object")
    known = {**values, **nested}
    usual = _usual(str(values["model_type"])).rotary_share
    share = next((known[key] for key in ("partial_rotary_factor", "rotary_pct") if known.get(key) is not None), usual)
    kind = known.get("rope_type", known.get("type", "default"))
    found = [("partial_rotary_factor", share, "a shape turns all channels of a head")] * (share != 1)
    return found + [("rope_type", kind, "a shape has angles as they are")] * (kind != "default")


def _number(values: Mapping[str, Any], keys: tuple[str, ...], usual: float) -> float:
    """The first of the keys that has a value above zero, also inside `rope_parameters` (transformers 5); or `usual`."""
    inside = values.get("rope_parameters")
    values = {**values, **inside} if isinstance(inside, Mapping) else values
    key = next((key for key in keys if values.get(key) is not None), None)
    if key is None:
        return usual
    require_positive(key, values[key])
    return float(values[key])


def _activation(values: Mapping[str, Any], usual: SimpleNamespace) -> str:
    names = ("hidden_act", "activation_function", "hidden_activation", "activation")
    key = next((name for name in names if isinstance(values.get(name), str)), names[0])
    known, word = (
        shipped_json("huggingface")["gated" if usual.gated else "activations"],
        str(values.get(key, usual.act)),
    )
    require_known(key, word, known)
    return known[word]


def _biases(values: Mapping[str, Any], usual: SimpleNamespace) -> str:
    if not usual.bias_keys:
        return usual.biases
    given = {key: values.get(key, usual.biases == "all") for key in usual.bias_keys}
    words = ", ".join(f"{key}={str(value).lower()}" for key, value in given.items())
    require(len(set(map(str, given.values()))) == 1, "biases", words, "a shape has all or none of them")
    return "all" if next(iter(given.values())) is True else "none"


def _require_plain_attention(values: Mapping[str, Any], usual: SimpleNamespace, shape: ModelShape) -> None:
    """Raise ValueError for heads of another size, a projected embedding, and windows shorter than the sequence."""
    for key, own, rule in (
        ("head_dim", shape.head_dim, "a shape has hidden_size / num_attention_heads"),
        ("word_embed_proj_dim", shape.hidden_size, "a shape has an embedding of hidden_size"),
    ):
        require(values.get(key) in (None, own), key, values.get(key), f"{rule} = {own}")
    window = values.get("sliding_window", usual.window)
    slides = values.get("use_sliding_window", usual.slides) is True
    ok = window is None or not slides or (isinstance(window, int) and window >= shape.seq_length)
    rule = f"a shape attends to the whole sequence, seq = {shape.seq_length}; give a shorter one"
    require(ok, "sliding_window", window, rule)
