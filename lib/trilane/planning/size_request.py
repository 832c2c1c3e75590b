"""What a sizing asks for: parameters, the machine, the kind of shape; and the candidate shapes that
follow from it.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.options import check, option
from trilane.config.parallelism import LARGEST
from trilane.config.shapes import read_shape
from trilane.costmodel.shipped import calibration_for
from trilane.utils.tables import Record
from trilane.utils.validation import parse_count, require, require_known, require_positive

ANY = "any"  # engine
# NVIDIA, 'Matrix multiplication background', tile quantization; the prequel: nhidden % 128 = 0
TILE = 128
MOST = 1e14  # parameters: a hundred times what has been trained


# Published ratios of hidden size to layers: the prequel's table has 109 to 195 (530B) above 100B,
# and 204 in what it trained; below 20B they are narrower: 64 (GPT-2, 12 x 768) to 128 (GPT-3 13B,
# 40 x 5140; arXiv:2005.14165, table 2.1)
LARGE = 20e9
LARGE_RATIOS = (100.0, 250.0)
SMALL_RATIOS = (48.0, 160.0)
MOST_WIDTHS = 10
# Llama 3 (arXiv:2407.21783, table 3): 8 key-value heads, an MLP of 3.5 h at 8B and 70B; its
# predecessors without shared heads had 8/3 h (arXiv:2302.13971, section 2.2)
LLAMA = {
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "positions": "rotary",
    "biases": "none",
    "tied_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What proposed shapes have in common: fields of a ModelShape, shared heads, and the width of
    the MLP.

    kv_heads     heads of keys and values, where they can be shared by groups of equal size; 0: one
                 for each head
    ffn          channels of the MLP over the hidden size, rounded up to whole tiles; 0:
                 ModelShape's own rule
    ffn_alone    the same where no heads can be shared
    """

    fields: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 0
    ffn: float = 0.0
    ffn_alone: float = 0.0

    def shape(self, hidden: int, heads: int, **sizes: int) -> ModelShape:
        """One layer of this kind; `sizes` are seq_length and vocab_size."""
        shared = None
        if self.kv_heads and heads > self.kv_heads and heads % self.kv_heads == 0:
            shared = self.kv_heads
        if self.kv_heads and shared is None:
            ratio = self.ffn_alone
        else:
            ratio = self.ffn
        ffn = None
        if ratio:
            # large ones are cut by up to 8 GPUs
            if ratio * hidden >= 64 * TILE:
                step = 8 * TILE
            else:
                step = 2 * TILE
            ffn = max(math.ceil(ratio * hidden / step) * step, hidden)
        given = {"num_key_value_heads": shared, "ffn_hidden_size": ffn, **self.fields, **sizes}
        return ModelShape(num_layers=1, hidden_size=hidden, num_attention_heads=heads, **given)


KINDS = {
    "gpt2": Kind(),
    "bloom": Kind(fields={"positions": "alibi", "embedding_layernorm": True}),
    "llama": Kind(fields=LLAMA, kv_heads=8, ffn=3.5, ffn_alone=8 / 3),
}


def kind_of(like: str, seq_length: int) -> Kind:
    """The kind of that name, or that of the model in a JSON file (a shape, or a config.json), its
    ratios kept.
    """
    if not like.endswith(".json"):
        require_known("like", like, KINDS)
        return KINDS[like]
    shape = read_shape(like, seq_length=seq_length).shape
    fields = {name: getattr(shape, name) for name in (*LLAMA, "embedding_layernorm")}
    has_width = shape.ffn_hidden_size or shape.is_gated
    ratio = shape.ffn / shape.hidden_size if has_width else 0.0
    return Kind(fields=fields, kv_heads=shape.num_key_value_heads or 0, ffn=ratio, ffn_alone=ratio)


@dataclass(frozen=True, kw_only=True)
class SizeRequest(Record):
    """What is asked: a number of parameters, the machine, and how much is to be trained with what.

    `like` is gpt2, bloom or llama, or the JSON file of a model whose kind is wanted. `choices` pins
    what each shape's search would vary, or sets what it holds fixed (see planning.search.search).
    `tokens` is a number, or a text such as "300B" or "20x", so many for each parameter.
    """

    parameters: float = option(cli=False)
    # that of GPT-2
    vocabulary: int = option(
        50257, "tokens of the vocabulary; padded to a multiple of 128", minimum=1, name="vocab"
    )
    gpus: int = option(help="GPUs of the run", minimum=1)
    cluster: Cluster = option(cli=False)
    calibration: Any = option(
        None, cli=False
    )  # a Calibration, or a text as calibration_for() takes it
    engine: str = option(ENGINES[0], "what trains it; any: the fastest", choices=(*ENGINES, ANY))
    # 20 a parameter are compute-optimal: Hoffmann et al. 2022, arXiv:2203.15556
    tokens: str | float = option(
        "20x", "tokens to train on: 300B, or 20x, so many a parameter (compute-optimal)"
    )
    gbs: int = option(2048, "sequences of an iteration", minimum=1, maximum=LARGEST)
    seq_length: int = option(2048, "tokens of a sequence", minimum=1, name="seq")
    tolerance: float = option(
        0.03, "allowed distance from the target, as a share of it", above=0, below=0.5
    )
    like: str = option(
        "gpt2", "gpt2, bloom, llama, or a JSON file with a model: config.json", metavar="KIND"
    )
    choices: dict[str, Any] = option(dict, cli=False)

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.calibration, str):
            object.__setattr__(self, "calibration", calibration_for(self.cluster, self.calibration))
        if isinstance(self.tokens, str):
            if not self.tokens.endswith("x"):
                object.__setattr__(self, "tokens", parse_count("tokens", self.tokens))
        else:
            require_positive("tokens", self.tokens)
        require_positive("params", self.parameters)
        params = f"{self.parameters:g}"
        require(self.parameters <= MOST, "params", params, f"must be at most {MOST:g}")
        most = self.cluster.max_gpus
        require(self.gpus <= most, "gpus", self.gpus, f"{self.cluster.name} has {most}")
        iteration = self.gbs * self.seq_length
        rule = f"one iteration takes gbs x seq_length = {iteration}"
        require(self.tokens_of(self.parameters) >= iteration, "tokens", self.tokens, rule)
        rule = f"an embedding of {self.vocabulary} tokens nearly reaches that size; ask for more"
        require(bool(self.widths()), "params", params, rule)

    @property
    def engines(self) -> tuple[str, ...]:
        """What may train it."""
        if self.engine == ANY:
            return ENGINES
        return (self.engine,)

    def tokens_of(self, parameters: float) -> float:
        """Tokens to train so many parameters on."""
        if isinstance(self.tokens, str):
            return parse_count("tokens", self.tokens[:-1]) * parameters
        return self.tokens

    @property
    def tokens_text(self) -> str:
        """The tokens in words."""
        if isinstance(self.tokens, str):
            return f"{self.tokens[:-1]} a parameter"
        return f"{self.tokens / 1e9:g} B"

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of 128, which every tp up to
        128 divides.
        """
        return padded_vocab_size(self.vocabulary)

    def to_json(self) -> dict[str, Any]:
        """What is asked, the cluster by its name."""
        asked = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del asked["calibration"]
        return {**asked, "cluster": self.cluster.name, "vocab_size": self.vocab_size}

    @cached_property
    def kind(self) -> Kind:
        """What all shapes have in common."""
        return kind_of(self.like, self.seq_length)

    def layer(self, hidden: int) -> ModelShape | None:
        """One layer of that width, its heads nearest to a head size of 128; None where no number of
        heads fits.
        """
        node = min(self.cluster.gpus_per_node, self.gpus)
        heads = usable_heads(hidden, node) or usable_heads(hidden, 1)
        if not heads:
            return None
        vocab_size = self.vocab_size
        return self.kind.shape(hidden, heads[0], vocab_size=vocab_size, seq_length=self.seq_length)

    def widths(self) -> list[int]:
        """Hidden sizes between the published ratios, at most ten: multiples of 64, 128, 256, 512,
        ...
        """
        low, high = LARGE_RATIOS if self.parameters >= LARGE else SMALL_RATIOS
        # all parameters in layers of that ratio, of 12 h^2
        highest = (self.parameters * high / 12) ** (1 / 3)
        step = TILE if highest > 8 * TILE else TILE // 2
        widths = []
        for hidden in range(step, int(highest) + 1, step):
            layer = self.layer(hidden)
            if layer is None:
                continue
            embeddings = layer.embedding_parameters * (1 if layer.tied_embeddings else 2)
            layers = (self.parameters - embeddings) / layer.layer_weights
            if layers >= 1 and low <= hidden / layers <= high:
                widths.append(hidden)
        while len(widths) > MOST_WIDTHS:
            step *= 2
            widths = [hidden for hidden in widths if hidden % step == 0]
        return widths

    def shapes(self) -> list[ModelShape]:
        """Every depth of every width within the tolerance, or the nearest where no depth comes so
        near (few layers).
        """
        shapes = []
        for hidden in self.widths():
            layer = self.layer(hidden)
            assert layer is not None
            exact = (self.parameters - layer.parameters) / layer.layer_parameters + 1
            margin = self.tolerance * self.parameters / layer.layer_parameters
            depths = range(max(1, math.ceil(exact - margin)), math.floor(exact + margin) + 1)
            for depth in depths or [max(1, round(exact))]:
                shapes.append(dataclasses.replace(layer, num_layers=depth))
        return shapes


def usable_heads(hidden: int, most_tp: int) -> list[int]:
    """Numbers of heads whose size is a multiple of 8 from 64 (GPT-2) to 256, and that `most_tp`
    ranks can share.

    The one whose head size is nearest to 128 comes first. Published are sizes up to 224 (the
    prequel's 14336 / 64).
    """
    counts = []
    for heads in range(most_tp, hidden // 64 + 1, most_tp):
        if hidden % (8 * heads) == 0 and hidden // heads <= 256:
            counts.append(heads)
    return sorted(counts, key=lambda heads: (abs(hidden // heads - 128), heads))
