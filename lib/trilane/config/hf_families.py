"""Models of transformers that are our shapes: their configurations and their names of our parameters; a table a family.

Canonical names are megatron-core's; the layouts behind them are in engine/checkpoint/hf_names.py. Sources:
transformers 5.23, models/*/configuration_*.py and modeling_*.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trilane.config.model import ModelShape
from trilane.utils.validation import require

HEAD = "lm_head.weight"
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
Words = Mapping[object, Mapping[str, object]]


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
    others       names of tensors that are no parameters
    """

    model: str
    base: str
    layers: str
    fields: Mapping[str, Words]
    sizes: Mapping[str, str]
    names: Mapping[str, str]
    dropout: Mapping[str, str]
    settings: Mapping[str, object] = field(default_factory=dict)
    by_group: bool = False
    transposed: bool = False
    others: str = r".*\.rotary_emb\.inv_freq"

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
        stem, _, end = name.rpartition(".")
        found = LAYER.fullmatch(stem)
        prefix, part = (f"{self.layers}.{found[1]}.", found[2]) if found else ("", stem)
        require(part in self.names or name == "output_layer.weight", "parameter", name, f"{self.model} has none")
        return (
            [HEAD] if part not in self.names else [f"{self.base}.{prefix}{n}.{end}" for n in self.names[part].split()]
        )


PLAIN: dict[str, Words] = {"normalization": {"layernorm": {}}, "num_key_value_heads": {None: {}}, "biases": {"all": {}}}
GPT2 = Family(
    model="GPT2LMHeadModel",
    base="transformer",
    layers="h",
    fields={
        "positions": {"learned": {"model_type": "gpt2"}},
        "activation": {
            "gelu": {"activation_function": "gelu"},
            "gelu-tanh": {"activation_function": "gelu_new"},
            "relu": {"activation_function": "relu"},
            "squared-relu": {"activation_function": "relu2"},
        },
        "embedding_layernorm": {False: {}},
        **PLAIN,
    },
    sizes={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "seq_length": "n_positions",
        "vocab_size": "vocab_size",
        "ffn": "n_inner",
        "tied_embeddings": "tie_word_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
    },
    dropout={"embd_pdrop": "hidden", "resid_pdrop": "hidden", "attn_pdrop": "attention"},
    settings={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names={
        "embedding.word_embeddings": "wte",
        "embedding.position_embeddings": "wpe",
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
        "decoder.final_layernorm": "ln_f",
    },
    transposed=True,
    others=r"transformer\.h\.\d+\.attn\.(masked_)?bias",  # causal masks of older transformers
)
BLOOM = Family(
    model="BloomForCausalLM",
    base="transformer",
    layers="h",
    fields={
        "positions": {"alibi": {"model_type": "bloom"}},
        "activation": {"gelu-tanh": {}},  # BloomGelu is Megatron's fused kernel, the tanh form
        "embedding_layernorm": {True: {}},
        "ffn_hidden_size": {None: {}},
        **PLAIN,
    },
    sizes={
        "num_layers": "n_layer",
        "hidden_size": "hidden_size",
        "num_attention_heads": "n_head",
        "seq_length": "seq_length",
        "vocab_size": "vocab_size",
        "tied_embeddings": "tie_word_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
    },
    dropout={"hidden_dropout": "hidden", "attention_dropout": "attention"},
    settings={"apply_residual_connection_post_layernorm": False},
    names={
        "embedding.word_embeddings": "word_embeddings",
        "embedding.layernorm": "word_embeddings_layernorm",
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "decoder.final_layernorm": "ln_f",
    },
    by_group=True,
)
LLAMA = Family(
    model="LlamaForCausalLM",
    base="model",
    layers="layers",
    fields={
        "positions": {"rotary": {"model_type": "llama"}},
        "normalization": {"rmsnorm": {}},
        "activation": {"swiglu": {"hidden_act": "silu"}},
        "embedding_layernorm": {False: {}},
        "biases": {
            "none": {"attention_bias": False, "mlp_bias": False},
            "all": {"attention_bias": True, "mlp_bias": True},
        },
    },
    sizes={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "tied_embeddings": "tie_word_embeddings",
        "norm_epsilon": "rms_norm_eps",
        "rotary_base": "rope_theta",
    },
    dropout={"attention_dropout": "attention"},
    names={
        "embedding.word_embeddings": "embed_tokens",
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
        "decoder.final_layernorm": "norm",
    },
)
QWEN2 = replace(
    LLAMA,
    model="Qwen2ForCausalLM",
    fields={**LLAMA.fields, "positions": {"rotary": {"model_type": "qwen2"}}, "biases": {"qkv": {}}},
)
MISTRAL = replace(
    LLAMA,
    model="MistralForCausalLM",
    fields={
        **LLAMA.fields,
        "positions": {"rotary": {"model_type": "mistral", "sliding_window": None}},
        "biases": {"none": {}},
    },
)
# By the type in a config.json. A shape is exported as the first that has it, so that no Mistral is ever written.
FAMILIES = {"gpt2": GPT2, "bloom": BLOOM, "llama": LLAMA, "qwen2": QWEN2, "mistral": MISTRAL}


def family_of(shape: ModelShape) -> Family:
    """The first family that has `shape`; ValueError that names the field which those with its positions lack."""
    if misfit := misfit_of(shape):
        require(False, *misfit)
    return next(family for family in FAMILIES.values() if not family.misfit(shape))


def misfit_of(shape: ModelShape) -> tuple[str, object, str] | None:
    """Why no family has `shape`: a field, its value and the rule; None where one has."""
    alike = [family for family in FAMILIES.values() if shape.positions in family.fields["positions"]]
    misfits = [family.misfit(shape) for family in alike]
    if not alike:
        return "positions", shape.positions, "GPT-2 has learned ones, BLOOM alibi, Llama rotary"
    return misfits[0] if all(misfits) else None
