"""ModelShape: the sizes of a GPT, its parameters and its FLOPs per iteration."""

from dataclasses import dataclass
from pathlib import Path

from trilane.utils.validation import from_mapping, is_count, read_json, require, require_integer

# Beyond these a file has a size wrong: a hundred times what has been trained.
LARGEST = {"num_layers": 1 << 16, "hidden_size": 1 << 18, "num_attention_heads": 1 << 18}
LARGEST |= {"seq_length": 1 << 24, "vocab_size": 1 << 24}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A GPT-2 architecture: LayerNorm before attention and MLP, GELU, 4 h wide MLP, learned positions.

    `vocab_size` is the number of rows of the embedding matrix, already padded (see padded_vocab_size), so that the
    loss is the same on every tensor-parallel size. Raises ValueError for a size below 1 or beyond LARGEST, and
    for heads that do not divide.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    tied_embeddings: bool = True
    embedding_layernorm: bool = False

    def __post_init__(self) -> None:
        for field, most in LARGEST.items():
            require_integer(field, getattr(self, field), 1, most)
        rule = f"must divide hidden_size={self.hidden_size}"
        require(self.hidden_size % self.num_attention_heads == 0, "num_attention_heads", self.num_attention_heads, rule)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer: 12 h^2 + 13 h (four h x 4h-equivalent matrices, biases, two norms)."""
        h = self.hidden_size
        return 12 * h * h + 13 * h

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding matrix alone: V h."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters: L (12 h^2 + 13 h) + V h + s h + 2 h; untied output and embedding LayerNorm add theirs.

        Source: the BigScience chronicles' prequel (the formula of its section 'Size'); exact for the engine's model.
        """
        L, h, s, V = self.num_layers, self.hidden_size, self.seq_length, self.vocab_size
        untied = 0 if self.tied_embeddings else V * h
        return L * self.layer_parameters + V * h + s * h + 2 * h + untied + 2 * h * self.embedding_layernorm

    def flops_per_iteration(self, gbs: float, recompute_full: bool = False) -> float:
        """FLOPs of one iteration over `gbs` sequences.

            F = 72 B s L h^2 (1 + s / (6 h) + V / (12 L h))      forward + backward
            F = 96 B s L h^2 (1 + s / (6 h) + V / (16 L h))      with full activation recomputation

        Narayanan et al. 2021, arXiv:2104.04473, equation 3 and appendix. Left out: norms, GELU, softmax, optimizer, and
        the half of the score matrix that a causal attention kernel may skip.
        """
        B, s, L, h, V = gbs, self.seq_length, self.num_layers, self.hidden_size, self.vocab_size
        factor = 96 if recompute_full else 72
        return factor * B * s * L * h * h * (1 + s / (6 * h) + V / (factor / 6 * L * h))


def padded_vocab_size(tokens: int, tp: int = 1, multiple: int = 128) -> int:
    """`tokens` rounded up to a multiple of `multiple` x tp, as Megatron's --make-vocab-size-divisible-by does."""
    require_integer("tokens", tokens, 1)
    step = multiple * tp
    return -(-tokens // step) * step


def read_shape(text: str) -> ModelShape:
    """The shape of five numbers (see parse_shape), of a JSON file with a shape's fields, or of a plan's file."""
    if not text.endswith(".json") and not Path(text).is_file():
        return parse_shape(text)
    values = read_json(text, "shape")
    return from_mapping(ModelShape, values.get("shape", values) if isinstance(values, dict) else values, "shape")


def parse_shape(text: str) -> ModelShape:
    """The shape of "layers,hidden,heads,seq,vocab", such as "70,14336,112,2048,250880"; ValueError otherwise."""
    parts = text.replace(" ", "").split(",")
    ok = len(parts) == 5 and all(map(is_count, parts))
    require(ok, "shape", text, "must be five whole numbers: layers,hidden,heads,seq,vocab")
    L, h, a, seq, V = (int(part) for part in parts)
    return ModelShape(num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=seq, vocab_size=V)
