"""Shapes of files and of five numbers; the parameters of a config.json are those that transformers
makes of it.
"""

import json
from dataclasses import replace

import pytest

from trilane.cli.app import main
from trilane.config.model import ModelShape, parse_shape
from trilane.config.shapes import family_of, shape_of_config
from trilane.utils.validation import shipped_json

# Sizes of config.json as published on huggingface.co.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384}
SMALL |= {"max_position_embeddings": 128}
OPT = {"ffn_dim": 192, "word_embed_proj_dim": 64}
GRANITE = {"num_local_experts": 0, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 16}
GRANITE |= {"shared_intermediate_size": 160, "position_embedding_type": "rope"}
SHARED = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}
MADE = [
    ("gpt2", {"n_inner": 192}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("bloom", {"seq_length": 128}),
    ("opt", OPT),
    ("opt", OPT | {"enable_bias": False}),
    ("nemotron", {"num_key_value_heads": 2, "head_dim": 16}),
    ("starcoder2", {"num_key_value_heads": 2}),
    ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"num_key_value_heads": 2, "head_dim": 16}),
    ("qwen2", {"num_key_value_heads": 2}),
    ("qwen3", {"num_key_value_heads": 2}),
    ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    ("apertus", {"num_key_value_heads": 2}),
    ("granite", {"tie_word_embeddings": True}),
    ("granitemoehybrid", GRANITE),
    ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    ("phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    ("mixtral", {"num_key_value_heads": 2}),
    ("qwen3_moe", {"num_key_value_heads": 2, "moe_intermediate_size": 48, "num_experts": 12}),
    ("qwen2_moe", SHARED | {"num_key_value_heads": 2, "mlp_only_layers": [0]}),
    ("olmoe", {"num_key_value_heads": 2}),
]


@pytest.mark.slow
@pytest.mark.xdist_group(
    "pool"
)  # whose worker imports transformers for tests/engine/test_hf_export.py, too
@pytest.mark.parametrize(("kind", "values"), MADE, ids=str)
def test_the_parameters_are_those_of_the_model_that_transformers_makes(kind: str, values: dict):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    width = {} if kind in ("gpt2", "bloom", "opt") else {"intermediate_size": 192}
    config = transformers.CONFIG_MAPPING[kind](**SMALL, **tokens, **width, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(json.loads(config.to_json_string()), 128)
    counted = sum(p.numel() for p in model.parameters())
    positions = 2 * 64 if kind == "opt" else 0  # not counted
    assert counted == shape.parameters + positions


def test_every_type_is_compared_with_transformers():
    assert {kind for kind, _ in MADE} == set(shipped_json("huggingface")["configs"])


@pytest.mark.parametrize(
    "theta", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_what_decides_the_function_besides_the_sizes_is_read(theta: dict):
    """Llama 1 has 1e-6 and 10000, Llama 3 1e-5 and 500000 (transformers 5 keeps it deeper); GPT-2
    has tanh.
    """
    shape = shape_of_config(LLAMA)
    assert (shape.norm_epsilon, shape.rotary_base) == (1e-6, 1e4)
    given = shape_of_config(LLAMA | {"rms_norm_eps": 1e-5} | theta, 8192)
    assert (given.norm_epsilon, given.rotary_base) == (1e-5, 5e5)
    assert shape_of_config(GPT2).activation == "gelu-tanh"
    assert shape_of_config(GPT2 | {"activation_function": "gelu"}).activation == "gelu"


WINDOW = {"sliding_window": 2048}
BAD = [
    ({"num_local_experts": 8}, "num_local_experts=8: a shape of this type has no experts"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step=2: a shape has"),
    (
        {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2}
        | SHARED
        | {"mlp_only_layers": [0, 5]},
        "mlp_only_layers=[0, 5]: a shape has [0, 1]",
    ),
    (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2} | WINDOW,
        "sliding_window=2048: must be a whole number of at least 4096",
    ),
    ({"model_type": "bert"}, "model_type=bert: no decoder that a shape describes; known: apertus,"),
    ({"head_dim": 63}, "num_attention_heads=32: rotary positions turn pairs"),
    ({"no_rope_layers": [0, 1]}, "no_rope_layers=[0, 1]: a shape has [1, 1, 1"),
    ({"vocab_size": None}, "shape.vocab_size=missing: is required"),
    (WINDOW, "sliding_window=2048: must be a whole number of at least 4096"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD, ids=[message.partition(":")[0] for _, message in BAD]
)
def test_what_is_no_decoder_of_ours_is_one_line(changes: dict, message: str, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    shape = ["--shape", str(path)]
    machine = ["--cluster", "dgx-h100", "--gbs", "8"]
    assert main(["plan", "show", *shape, *machine]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"trilane: {message}"), err


LEARNED = parse_shape("2,64,4,64,384")
ROTARY = replace(
    LEARNED, positions="rotary", normalization="rmsnorm", activation="swiglu", biases="none"
)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (replace(LEARNED, positions="none"), "positions=none: GPT2LMHeadModel has learned"),
        (replace(ROTARY, biases="qkv", qk_layernorm=True), "qk_layernorm=True: no model of"),
    ],
)
def test_a_shape_without_family_is_refused_by_the_name_of_a_field(shape: ModelShape, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        family_of(shape)
