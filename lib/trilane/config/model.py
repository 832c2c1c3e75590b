"""ModelShape: the sizes of a dense decoder (GPT, BLOOM, Llama, ...), its parameters and its FLOPs
per iteration.
"""

from typing import Any

from trilane.config.options import Rules, check, option
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import is_count, parse_integers, require, require_integer

GATED = ("swiglu", "geglu")


def _size(help: str, bits: int, **facts: Any) -> Any:
    # a hundred times what has been trained: beyond it a file has a size wrong
    return option(help=help, minimum=1, maximum=1 << bits, **facts)


@frozen
class ModelShape(Record):
    """The sizes of a dense decoder; without the fields after `vocab_size`, those of GPT-2.

    Norms stand before attention and MLP, one after the last layer. Raises ValueError for sizes out
    of range, for heads that neither divide nor have a size, and an MLP narrower than the model.
    """

    num_layers: int = _size("transformer layers", 16, megatron="num-layers")
    hidden_size: int = _size(
        "width; a multiple of the attention heads, or see kv_channels", 18, megatron="hidden-size"
    )
    num_attention_heads: int = _size(
        "attention heads; tp divides them", 18, megatron="num-attention-heads"
    )
    seq_length: int = _size("tokens of a sequence", 24, megatron="seq-length")
    # padded, so that the loss is the same on every tensor-parallel size (padded_vocab_size)
    vocab_size: int = _size("rows of the embedding matrix, padding included", 24)
    tied_embeddings: bool = option(True, "whether input and output embedding are one matrix")
    embedding_layernorm: bool = option(False, "a LayerNorm after the embedding, as in BLOOM")
    num_key_value_heads: int | None = option(
        None,
        "heads of keys and values, shared by groups of query heads; null: one for each query head",
        minimum=1,
    )
    ffn_hidden_size: int | None = option(
        None,
        "channels inside the MLP; null: 4 x hidden_size, with a gate 8/3 of it in multiples of 64",
        minimum=1,
        maximum=1 << 22,
    )
    activation: str = option(
        "gelu",
        "of the MLP; gelu-tanh is that in GPT-2's and BLOOM's code; xielu trains two parameters a "
        "layer; swiglu and geglu have a gate",
        choices=("gelu", "gelu-tanh", "relu", "squared-relu", "xielu", *GATED),
    )
    normalization: str = option(
        "layernorm", "rmsnorm has half as many parameters", choices=("layernorm", "rmsnorm")
    )
    positions: str = option(
        "learned",
        "learned is a table of seq_length rows; the others have no parameters",
        choices=("learned", "rotary", "alibi", "none"),
    )
    biases: str = option(
        "all",
        "which matrices have one; qkv: queries, keys and values alone",
        choices=("all", "qkv", "none"),
    )
    norm_epsilon: float = option(
        1e-5,
        "what norms add to the variance (Llama 1 and Qwen: 1e-6)",
        above=0,
        below=1,
        predicts=False,
    )
    rotary_base: float = option(
        1e4,
        "the longest wavelength is almost 2 pi times this, rope_theta (Llama 3: 500000)",
        above=1,
        maximum=1e12,
        predicts=False,
    )
    kv_channels: int | None = option(
        None,
        "channels of a head; null: hidden_size / num_attention_heads",
        minimum=1,
        maximum=1 << 18,
    )
    qk_layernorm: bool = option(
        False, "a norm of each head's queries, and one of its keys", megatron="qk-layernorm"
    )
    no_rope_freq: int = option(
        0,
        "every so manieth layer has no rotary positions (SmolLM3: 4); 0: all have; changes no size",
        maximum=1 << 16,
        predicts=False,
    )

    def __post_init__(self) -> None:
        check(self)
        # one shape has one way to be written: what is usual is None
        if self.num_key_value_heads == self.num_attention_heads:
            object.__setattr__(self, "num_key_value_heads", None)
        if self.query_channels == self.hidden_size:
            object.__setattr__(self, "kv_channels", None)
        if self.ffn_hidden_size == self._usual_ffn:
            object.__setattr__(self, "ffn_hidden_size", None)

    def rules(self) -> Rules:
        """What several sizes must be to each other."""
        h = self.hidden_size
        heads = self.num_attention_heads
        divides = self.kv_channels is not None or h % heads == 0
        yield divides, "num_attention_heads", f"must divide hidden_size={h}"
        rule = f"must divide num_attention_heads={heads}"
        yield heads % self.kv_heads == 0, "num_key_value_heads", rule
        yield self.ffn >= h, "ffn_hidden_size", f"must be at least hidden_size={h}"
        rule = f"rotary positions turn pairs of channels, a head has {self.head_dim}"
        is_rotary = self.positions == "rotary"
        yield not is_rotary or self.head_dim % 2 == 0, "num_attention_heads", rule
        rule = "leaves rotary positions out, and must divide num_layers"
        is_whole = is_rotary and self.num_layers % max(self.no_rope_freq, 1) == 0
        yield is_whole or not self.no_rope_freq, "no_rope_freq", rule

    @property
    def _usual_ffn(self) -> int:
        """4 h; gated, 8/3 h in whole multiples of 64, as Megatron-LM's --swiglu has it
        (arguments.py).
        """
        h = self.hidden_size
        if self.is_gated:
            return max(8 * h // 3 // 64 * 64, h)
        return 4 * h

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate: a third matrix."""
        return self.activation in GATED

    @property
    def ffn(self) -> int:
        """Channels inside the MLP."""
        return self.ffn_hidden_size or self._usual_ffn

    @property
    def kv_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_channels(self) -> int:
        """Channels of all queries, and of what attention gives to its projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def qkv_channels(self) -> int:
        """Channels of all queries, keys and values."""
        return self.query_channels + 2 * self.kv_heads * self.head_dim

    def has_rope(self, number: int) -> bool:
        """Whether layer `number`, from 1, turns queries and keys by their positions."""
        is_left_out = self.no_rope_freq > 0 and number % self.no_rope_freq == 0
        return self.positions == "rotary" and not is_left_out

    @property
    def layer_weights(self) -> int:
        """Entries of a layer's matrices: queries, keys and values; projection; the MLP. GPT-2:
        12 h^2.
        """
        attention = self.qkv_channels + self.query_channels
        return self.hidden_size * (attention + (2 + self.is_gated) * self.ffn)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: LayerNorm 2 h, RMSNorm h."""
        return self.hidden_size * (2 if self.normalization == "layernorm" else 1)

    @property
    def inner_parameters(self) -> int:
        """Parameters inside a layer's attention and MLP that every rank holds whole: norms of
        queries and keys, and the two of xIELU.
        """
        norms = 2 * self.norm_parameters // self.hidden_size * self.head_dim
        return self.qk_layernorm * norms + 2 * (self.activation == "xielu")

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer. GPT-2: 12 h^2 + 13 h, of which 9 h are biases."""
        h = self.hidden_size
        biases = 0
        if self.biases != "none":
            biases += self.qkv_channels
        if self.biases == "all":
            biases += 2 * h + (1 + self.is_gated) * self.ffn
        return self.layer_weights + biases + 2 * self.norm_parameters + self.inner_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding matrix alone: V h."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters: layers, V h (twice where the output has its own matrix), the last norm,
        positions if learned.

        GPT-2: L (12 h^2 + 13 h) + V h + s h + 2 h. Source: the BigScience chronicles' prequel (the
        formula of its section 'Size'); exact for the engine's model.
        """
        h = self.hidden_size
        total = self.num_layers * self.layer_parameters + self.norm_parameters
        total += self.embedding_parameters
        if not self.tied_embeddings:
            total += self.embedding_parameters
        if self.positions == "learned":
            total += self.seq_length * h
        if self.embedding_layernorm:
            total += 2 * h
        return total

    def flops_per_iteration(self, gbs: float, recompute_full: bool = False) -> float:
        """FLOPs of one iteration over `gbs` sequences: three times the forward pass, four with full
        recomputation.

            forward of a layer = 2 B s W + 4 B s^2 h    W entries of its matrices; own heads:
                                                        their channels for the second h
            logits             = 2 B s h V              never recomputed
            GPT-2, W = 12 h^2:   F = 72 B s L h^2 (1 + s / (6 h) + V / (12 L h)),
                       or, recomputed, 96 B s L h^2 (1 + s / (6 h) + V / (16 L h))

        Narayanan et al. 2021, arXiv:2104.04473, equation 3 and appendix. Left out: norms,
        activation, softmax, optimizer, and the half of the score matrix that a causal attention
        kernel may skip.
        """
        B = gbs
        s = self.seq_length
        L = self.num_layers
        h = self.hidden_size
        V = self.vocab_size
        layers = L * (2 * B * s * self.layer_weights + 4 * B * s * s * self.query_channels)
        return (4 if recompute_full else 3) * layers + 6 * B * s * h * V


def padded_vocab_size(tokens: int, tp: int = 1, multiple: int = 128) -> int:
    """`tokens` rounded up to a multiple of `multiple` x tp, as Megatron's
    --make-vocab-size-divisible-by does.
    """
    require_integer("tokens", tokens, 1)
    step = multiple * tp
    return -(-tokens // step) * step


def parse_shape(text: str) -> ModelShape:
    """The shape of "layers,hidden,heads,seq,vocab", such as "70,14336,112,2048,250880"; ValueError
    otherwise.
    """
    rule = "must be five whole numbers above zero, layers,hidden,heads,seq,vocab, or a JSON file"
    parts = [part.strip() for part in text.split(",")]
    require(len(parts) == 5 and all(map(is_count, parts)), "shape", text, rule)
    sizes = parse_integers("shape", text)
    L, h, a, seq, V = sizes
    return ModelShape(
        num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=seq, vocab_size=V
    )
