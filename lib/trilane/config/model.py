"""ModelShape: the sizes of a decoder (GPT, BLOOM, Llama, Mixtral, ...), its parameters and its
FLOPs per iteration.
"""

from typing import Any

from trilane.config.options import Rules, changed, check, option
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import is_count, parse_integers, require, require_integer

GATED = ("swiglu", "geglu")
# fields of a mixture of experts, which a dense model leaves as they are
MIXTURE = (
    "experts",
    "top_k",
    "expert_ffn",
    "shared_experts",
    "shared_ffn",
    "shared_gate",
    "first_dense",
    "router_pre_softmax",
    "router_scaling",
    "aux_loss",
)


def _size(help: str, bits: int, **facts: Any) -> Any:
    # a hundred times what has been trained: beyond it a file has a size wrong
    return option(help=help, minimum=1, maximum=1 << bits, **facts)


@frozen
class ModelShape(Record):
    """The sizes of a decoder; without the fields after `vocab_size`, those of GPT-2.

    Norms stand before attention and MLP, one after the last layer. With experts each layer behind
    the first `first_dense` has them in place of its MLP, and a matrix that routes tokens to them.
    Raises ValueError for sizes out of range, for heads that neither divide nor have a size, and an
    MLP narrower than the model.
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
        megatron="norm-epsilon",
        predicts=False,
    )
    rotary_base: float = option(
        1e4,
        "the longest wavelength is almost 2 pi times this, rope_theta (Llama 3: 500000)",
        above=1,
        maximum=1e12,
        megatron="rotary-base",
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
    qk_norm_whole: bool = option(False, "one such norm for all heads, as OLMoE has")
    no_rope_freq: int = option(
        0,
        "every so manieth layer has no rotary positions (SmolLM3: 4); 0: all have; changes no size",
        maximum=1 << 16,
        megatron="no-rope-freq",
        predicts=False,
    )
    experts: int = option(
        0, "experts of a layer; 0: dense", maximum=1 << 14, megatron="num-experts"
    )
    top_k: int = option(0, "experts that a token goes to", megatron="moe-router-topk")
    expert_ffn: int = option(
        0, "channels inside an expert", maximum=1 << 22, megatron="moe-ffn-hidden-size"
    )
    shared_experts: int = option(0, "experts beside them that every token goes to", maximum=1 << 10)
    shared_ffn: int = option(0, "channels inside each of these", maximum=1 << 22)
    shared_gate: bool = option(
        False, "a weight of the shared experts for each token", megatron="moe-shared-expert-gate"
    )
    first_dense: int = option(0, "layers in front without experts")
    router_pre_softmax: bool = option(
        False,
        "softmax over all experts, not over those that were chosen",
        megatron="moe-router-pre-softmax",
        predicts=False,
    )
    router_scaling: float = option(
        1.0,
        "what the weights of the chosen are multiplied by",
        above=0,
        maximum=1e6,
        megatron="moe-router-topk-scaling-factor",
        predicts=False,
    )
    aux_loss: float = option(
        0.0,
        "share of the loss that balances experts; 0: none",
        maximum=1e3,
        megatron="moe-aux-loss-coeff",
        predicts=False,
    )

    def __post_init__(self) -> None:
        check(self)
        # one shape has one way to be written: what is usual is None
        if self.num_key_value_heads == self.num_attention_heads:
            object.__setattr__(self, "num_key_value_heads", None)
        if self.query_channels == self.hidden_size:
            object.__setattr__(self, "kv_channels", None)
        if self.ffn_hidden_size == self._usual_ffn or self.expert_layers == self.num_layers:
            object.__setattr__(self, "ffn_hidden_size", None)

    def rules(self) -> Rules:
        """What several sizes must be to each other."""
        h = self.hidden_size
        heads = self.num_attention_heads
        divides = self.kv_channels is not None or h % heads == 0
        yield divides, "num_attention_heads", f"must divide hidden_size={h}"
        rule = f"must divide num_attention_heads={heads}"
        yield heads % self.kv_heads == 0, "num_key_value_heads", rule
        is_wide = self.ffn >= h or self.expert_layers == self.num_layers
        yield is_wide, "ffn_hidden_size", f"must be at least hidden_size={h}"
        rule = f"rotary positions turn pairs of channels, a head has {self.head_dim}"
        is_rotary = self.positions == "rotary"
        yield not is_rotary or self.head_dim % 2 == 0, "num_attention_heads", rule
        rule = "leaves rotary positions out, and must divide num_layers"
        is_whole = is_rotary and self.num_layers % max(self.no_rope_freq, 1) == 0
        yield is_whole or not self.no_rope_freq, "no_rope_freq", rule
        is_normed = self.qk_layernorm or not self.qk_norm_whole
        yield is_normed, "qk_norm_whole", "needs qk_layernorm"
        yield self.experts != 1, "experts", "must be 0, which is dense, or above 1"
        if self.experts:
            rule = f"must be 1 to experts={self.experts}"
            yield 0 < self.top_k <= self.experts, "top_k", rule
            yield self.expert_ffn > 0, "expert_ffn", "must be above zero, as there are experts"
            rule = f"must be above zero exactly where shared_experts={self.shared_experts} is"
            yield (self.shared_ffn > 0) == (self.shared_experts > 0), "shared_ffn", rule
            yield self.shared_experts or not self.shared_gate, "shared_gate", "needs shared_experts"
            rule = f"must be below num_layers={self.num_layers}"
            yield self.first_dense < self.num_layers, "first_dense", rule
        else:
            named = changed(self)
            for name in MIXTURE:
                yield name not in named, name, "needs experts"

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
    def attention_weights(self) -> int:
        """Entries of the matrices of a layer's attention: queries, keys and values; projection."""
        return self.hidden_size * (self.qkv_channels + self.query_channels)

    def mlp_weights(self, channels: int) -> int:
        """Entries of the matrices of an MLP with so many channels inside."""
        return self.hidden_size * (2 + self.is_gated) * channels

    @property
    def layer_weights(self) -> int:
        """Entries of a dense layer's matrices: attention's and the MLP's. GPT-2: 12 h^2."""
        return self.attention_weights + self.mlp_weights(self.ffn)

    @property
    def shared_channels(self) -> int:
        """Channels inside all shared experts."""
        return self.shared_experts * self.shared_ffn

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.first_dense if self.experts else 0

    def expert_weights(self, experts: int) -> int:
        """Entries of the matrices that replace the MLP of a layer with experts: those of so many
        experts, of the shared ones, of the router, and their gate.
        """
        inside = experts * self.expert_ffn + self.shared_channels
        return self.mlp_weights(inside) + self.hidden_size * (self.experts + self.shared_gate)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: LayerNorm 2 h, RMSNorm h."""
        return self.hidden_size * (2 if self.normalization == "layernorm" else 1)

    @property
    def inner_parameters(self) -> int:
        """Parameters inside a layer's attention and MLP that every rank holds whole: norms of
        queries and keys, and the two of xIELU.
        """
        heads = 2
        if self.qk_norm_whole:
            heads = self.num_attention_heads + self.kv_heads
        norms = heads * self.norm_parameters // self.hidden_size * self.head_dim
        return self.qk_layernorm * norms + 2 * (self.activation == "xielu")

    def mlp_biases(self, mlps: int, channels: int) -> int:
        """Biases of so many MLPs with so many channels inside them all."""
        if self.biases != "all":
            return 0
        return mlps * self.hidden_size + (1 + self.is_gated) * channels

    @property
    def layer_parameters(self) -> int:
        """Parameters of a dense layer. GPT-2: 12 h^2 + 13 h, of which 9 h are biases."""
        biases = self.mlp_biases(1, self.ffn)
        if self.biases != "none":
            biases += self.qkv_channels
        if self.biases == "all":
            biases += self.hidden_size
        return self.layer_weights + biases + 2 * self.norm_parameters + self.inner_parameters

    def layers_parameters(self, experts: int) -> int:
        """Parameters of all layers, of so many experts in each layer that has some."""
        channels = experts * self.expert_ffn + self.shared_channels
        own = self.expert_weights(experts) + self.mlp_biases(
            experts + self.shared_experts, channels
        )
        dense = self.mlp_weights(self.ffn) + self.mlp_biases(1, self.ffn)
        return self.num_layers * self.layer_parameters + self.expert_layers * (own - dense)

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
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that a token meets: of the experts `top_k`."""
        return self._parameters(self.top_k)

    def _parameters(self, experts: int) -> int:
        h = self.hidden_size
        total = self.layers_parameters(experts) + self.norm_parameters
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

            forward of a layer = 2 B s W + 4 B s^2 h    W entries of its matrices, of the experts
                                                        top_k; own heads: their channels for the
                                                        second h
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
        replaced = self.expert_weights(self.top_k) - self.mlp_weights(self.ffn)
        weights = L * self.layer_weights + self.expert_layers * replaced
        layers = 2 * B * s * weights + L * 4 * B * s * s * self.query_channels
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
