"""What models of one type in Hugging Face's transformers share: the defaults of their config.json."""

from dataclasses import dataclass
from typing import Any

PARTIAL = {"gpt_neox": 0.25, "nemotron": 0.5}  # of a head's channels, where the configuration does not say
SERIAL = "a shape has the MLP after attention, not beside it"
BEFORE = "a shape has its norms before attention and MLP"


@dataclass(frozen=True, kw_only=True)
class ConfigDefaults:
    """What all models of one type share, and their configuration's defaults; names as in ModelShape.

    act           the activation where the configuration names none
    tied          whether output and embedding are one matrix where it does not say
    bias_keys     keys that turn all biases on or off; `biases` is what holds without them
    needs         key, its default, the only value that a shape can have, and the rule
    window        of sliding attention, in tokens, where the configuration does not say
    slides        whether windows are in use without `use_sliding_window`
    note          what a shape does not count
    """

    act: str
    normalization: str = "rmsnorm"
    epsilon: float = 1e-6
    positions: str = "rotary"
    biases: str = "none"
    gated: bool = True
    tied: bool = False
    bias_keys: tuple[str, ...] = ()
    embedding_layernorm: bool = False
    needs: tuple[tuple[str, object, object, str], ...] = ()
    window: int | None = None
    slides: bool = True
    note: str = ""


PLAIN: dict[str, Any] = {"normalization": "layernorm", "biases": "all", "gated": False, "epsilon": 1e-5}
BIASES = ("attention_bias", "mlp_bias")
POST_NORM = ("apply_residual_connection_post_layernorm", False, False, BEFORE)
HEAD_NORMS = "the norms of queries and keys (2 head_dim a layer) are not counted"
OPT_ROWS = "the two further rows of its table of positions are not counted"

# transformers 5.23, models/*/configuration_*.py and modeling_*.py
DEFAULTS = {
    "gpt2": ConfigDefaults(**PLAIN, act="gelu_new", positions="learned", tied=True),
    "gpt_neox": ConfigDefaults(
        **PLAIN,
        act="gelu",
        needs=(
            ("use_parallel_residual", True, False, SERIAL),
            ("attention_bias", True, True, "a shape has biases everywhere, or for queries, keys and values, or none"),
        ),
    ),
    "bloom": ConfigDefaults(
        **PLAIN, act="gelu_new", positions="alibi", tied=True, embedding_layernorm=True, needs=(POST_NORM,)
    ),
    "opt": ConfigDefaults(
        **PLAIN,
        act="relu",
        positions="learned",
        tied=True,
        bias_keys=("enable_bias",),
        needs=(
            ("do_layer_norm_before", True, True, BEFORE),
            ("layer_norm_elementwise_affine", True, True, "a shape's norms have parameters"),
            ("_remove_final_layer_norm", False, False, "a shape has a norm after the last layer"),
        ),
        note=OPT_ROWS,
    ),
    "falcon": ConfigDefaults(
        **{**PLAIN, "biases": "none"},
        act="gelu",
        tied=True,
        bias_keys=("bias",),
        needs=(
            ("new_decoder_architecture", False, False, SERIAL),
            ("parallel_attn", True, False, SERIAL),
            POST_NORM,
        ),
    ),
    "nemotron": ConfigDefaults(**{**PLAIN, "biases": "none"}, act="relu2", bias_keys=BIASES),
    "starcoder2": ConfigDefaults(**PLAIN, act="gelu_pytorch_tanh", tied=True, bias_keys=("use_bias",)),
    "llama": ConfigDefaults(act="silu", bias_keys=BIASES),
    "mistral": ConfigDefaults(act="silu", window=4096),
    "qwen2": ConfigDefaults(act="silu", biases="qkv", window=4096, slides=False),
    "qwen3": ConfigDefaults(act="silu", bias_keys=BIASES, window=4096, slides=False, note=HEAD_NORMS),
    "gemma": ConfigDefaults(act="gelu_pytorch_tanh", tied=True, bias_keys=BIASES),
    "phi3": ConfigDefaults(act="silu", epsilon=1e-5),
}
