"""A shape from outside: five numbers, a file of trilane, or a config.json of Hugging Face's transformers."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.hf_defaults import DEFAULTS, PARTIAL, ConfigDefaults
from trilane.config.model import ModelShape, padded_vocab_size, parse_shape
from trilane.utils.validation import from_mapping, read_json, require, require_integer, require_known, require_positive

# A size's names in transformers' configurations, the common one first.
NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "seq_length": ("max_position_embeddings", "n_positions", "seq_length"),
    "vocab_size": ("vocab_size",),
}
# Keys of models that are no dense decoders, whatever their type; 0, 1 and null mean that there is none.
EXPERTS = "a shape has one MLP a layer, no experts"
LATENT = "a shape has heads of queries, keys and values, no latent attention"
NOT_DENSE = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
NOT_DENSE |= {"kv_lora_rank": LATENT, "q_lora_rank": LATENT}
BASES = ("rope_theta", "rotary_emb_base")
FLAGS = ("tie_word_embeddings", "use_sliding_window", "multi_query", "alibi")
EPSILONS = ("layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
ACTIVATIONS = dict.fromkeys(("gelu", "gelu_python"), "gelu")
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu-tanh")
ACTIVATIONS |= {"relu": "relu", "relu2": "squared-relu"}
GATED = {"silu": "swiglu", "swish": "swiglu"} | dict.fromkeys(("gelu", "gelu_new", "gelu_pytorch_tanh"), "geglu")


@dataclass(frozen=True, kw_only=True)
class GivenShape:
    """A shape, and what was decided where it was read: a line each."""

    shape: ModelShape
    notes: tuple[str, ...] = ()


def read_shape(text: str, *, seq_length: int = 0, tp: int = 1) -> GivenShape:
    """The shape of five numbers (see parse_shape), of a JSON file (a shape's fields, a plan, a config.json), or of a
    folder with a config.json.

    `seq_length` above 0 takes the place of the one that it has. The vocabulary of five numbers and of a config.json is
    padded to a multiple of 128, as Megatron does, and of 128 x `tp` where that is needed; a file of trilane has rows
    that are padded already. Raises ValueError for what is no shape of a dense decoder.
    """
    notes: tuple[str, ...] = ()
    path = Path(text) / "config.json" if (Path(text) / "config.json").is_file() else Path(text)
    values = read_json(path, "shape") if text.endswith(".json") or path.is_file() else None
    if values is None:
        shape = parse_shape(text)
    elif isinstance(values, dict) and "model_type" in values:
        found = shape_of_config(values, seq_length)
        shape, notes = found.shape, found.notes
    else:
        own = values.get("shape", values) if isinstance(values, dict) else values
        return GivenShape(shape=_with_sequence(from_mapping(ModelShape, own, "shape"), seq_length))
    shape, rows = _with_sequence(shape, seq_length), padded_vocab_size(shape.vocab_size)
    rows = rows if rows % tp == 0 else padded_vocab_size(shape.vocab_size, tp)
    if rows != shape.vocab_size:
        what = "128" if rows == padded_vocab_size(shape.vocab_size) else f"128 x tp = 128 x {tp}"
        notes += (f"vocab_size={shape.vocab_size}: padded to {rows}, a multiple of {what}",)
    return GivenShape(shape=dataclasses.replace(shape, vocab_size=rows), notes=notes)


def _with_sequence(shape: ModelShape, seq_length: int) -> ModelShape:
    return dataclasses.replace(shape, seq_length=seq_length) if seq_length else shape


def shape_of_config(values: Mapping[str, Any], seq_length: int = 0) -> GivenShape:
    """The shape of a configuration of transformers, its vocabulary as it is; `seq_length` 0 takes the longest it has.

    Raises ValueError with the name of the key for a type that is not in DEFAULTS, for experts, latent attention,
    attention beside the MLP, heads that do not make up the hidden size, and windows shorter than the sequence.
    """
    for key, rule in NOT_DENSE.items():
        require(values.get(key) in (None, 0, 1), key, values.get(key), rule)
    require_known("model_type", str(values["model_type"]), DEFAULTS)
    defaults = DEFAULTS[str(values["model_type"])]
    for key, usual, needed, rule in defaults.needs:
        require(values.get(key, usual) == needed, key, values.get(key, usual), rule)
    sizes: dict[str, Any] = {name: _size(values, keys) for name, keys in NAMES.items()}
    sizes["seq_length"] = seq_length or sizes["seq_length"]
    for key in FLAGS:
        value = values.get(key)
        require(value is None or isinstance(value, bool), key, value, "must be true or false")
    if values["model_type"] == "falcon" and values.get("multi_query", True):
        sizes["num_key_value_heads"] = 1
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        require(sizes[name] is not None, NAMES[name][0], "missing", "is not in the configuration")
    require(sizes["seq_length"] is not None, "seq", "missing", "is not in the configuration; give it")
    has_usual = values["model_type"] in ("gpt2", "bloom", "falcon")  # theirs is 4 h, as a shape's
    require(
        has_usual or sizes["ffn_hidden_size"] is not None, "intermediate_size", "missing", "is not in the configuration"
    )
    positions = _positions(values, defaults)
    shape = ModelShape(
        **sizes,
        activation=_activation(values, defaults),
        normalization=defaults.normalization,
        positions=positions,
        biases=_biases(values, defaults),
        tied_embeddings=values.get("tie_word_embeddings", defaults.tied) is not False,
        embedding_layernorm=defaults.embedding_layernorm,
        norm_epsilon=_number(values, EPSILONS, defaults.epsilon),
        rotary_base=_number(values, BASES, ModelShape.rotary_base),
    )
    _require_plain_attention(values, defaults, shape)
    longest = _size(values, NAMES["seq_length"])
    notes = [] if seq_length else [f"seq={longest}: the longest of the configuration, as no other is given"]
    notes += [f"model_type={values['model_type']}: {defaults.note}"] * bool(defaults.note)
    turned = rotary_departures(values) if positions == "rotary" else []
    return GivenShape(shape=shape, notes=(*notes, *(f"{key}={value}: {rule}" for key, value, rule in turned)))


def _positions(values: Mapping[str, Any], defaults: ConfigDefaults) -> str:
    """Those of the type, but where Falcon chooses ALiBi; ValueError for two kinds at once."""
    alibi, kind = values.get("alibi") is True, values["model_type"]
    rule = f"a model of type {kind} has {defaults.positions} positions"
    require(not alibi or defaults.positions == "alibi" or kind == "falcon", "alibi", "true", rule)
    given = next((key for key in (*BASES, "rope_parameters") if values.get(key)), "")
    require(not given or defaults.positions == "rotary", given, values.get(given), rule)
    return "alibi" if alibi else defaults.positions


def rotary_departures(values: Mapping[str, Any]) -> list[tuple[str, object, str]]:
    """Where the model turns a part of the channels alone, or by other angles than a shape: key, value and rule."""
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    require(isinstance(nested, Mapping), "rope_parameters", nested, "must be an object")
    known = {**values, **nested}
    usual = PARTIAL.get(str(values["model_type"]), 1.0)
    share = next((known[key] for key in ("partial_rotary_factor", "rotary_pct") if known.get(key) is not None), usual)
    kind = known.get("rope_type", known.get("type", "default"))
    found = [("partial_rotary_factor", share, "a shape turns all channels of a head")] * (share != 1)
    return found + [("rope_type", kind, "a shape has angles as they are")] * (kind != "default")


def _size(values: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of the keys that has a value; None where none has."""
    for key in keys:
        if values.get(key) is not None:
            require_integer(key, values[key], 1)
            return int(values[key])
    return None


def _number(values: Mapping[str, Any], keys: tuple[str, ...], usual: float) -> float:
    """The first of the keys that has a value above zero, also inside `rope_parameters` (transformers 5); or `usual`."""
    inside = values.get("rope_parameters")
    values = {**values, **inside} if isinstance(inside, Mapping) else values
    key = next((key for key in keys if values.get(key) is not None), None)
    if key is None:
        return usual
    require_positive(key, values[key])
    return float(values[key])


def _activation(values: Mapping[str, Any], defaults: ConfigDefaults) -> str:
    names = ("hidden_act", "activation_function", "hidden_activation", "activation")
    key = next((name for name in names if isinstance(values.get(name), str)), names[0])
    known = GATED if defaults.gated else ACTIVATIONS
    word = values.get(key, defaults.act)
    require_known(key, str(word), known)
    return known[str(word)]


def _biases(values: Mapping[str, Any], defaults: ConfigDefaults) -> str:
    if not defaults.bias_keys:
        return defaults.biases
    given = {key: values.get(key, defaults.biases == "all") for key in defaults.bias_keys}
    words = ", ".join(f"{key}={str(value).lower()}" for key, value in given.items())
    require(len(set(map(str, given.values()))) == 1, "biases", words, "a shape has all or none of them")
    return "all" if next(iter(given.values())) is True else "none"


def _require_plain_attention(values: Mapping[str, Any], defaults: ConfigDefaults, shape: ModelShape) -> None:
    """Raise ValueError for heads of another size, a projected embedding, and windows shorter than the sequence."""
    for key, usual, rule in (
        ("head_dim", shape.head_dim, "a shape has hidden_size / num_attention_heads"),
        ("word_embed_proj_dim", shape.hidden_size, "a shape has an embedding of hidden_size"),
    ):
        value = values.get(key)
        require(value in (None, usual), key, value, f"{rule} = {usual}")
    window = values.get("sliding_window", defaults.window)
    slides = values.get("use_sliding_window", defaults.slides) is True
    ok = window is None or not slides or (isinstance(window, int) and window >= shape.seq_length)
    rule = f"a shape attends to the whole sequence, seq = {shape.seq_length}; give a shorter one"
    require(ok, "sliding_window", window, rule)
