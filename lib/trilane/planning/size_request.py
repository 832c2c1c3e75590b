"""What a sizing asks for: parameters, the machine, the kind of shape; and the candidate shapes that
follow from it.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What proposed shapes have in common: fields of a ModelShape, shared heads, and the width of
    the MLP.

    kv_heads     heads of keys and values, where they can be shared by groups of equal size; 0: one for each head
    ffn          channels of the MLP over the hidden size, rounded up to whole tiles; 0: ModelShape's own rule
    ffn_alone    the same where no heads can be shared
    """

    fields: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 0
    ffn: float = 0.0
    ffn_alone: float = 0.0

    def shape(self, hidden: int, heads: int, **sizes: int) -> ModelShape:
        """One layer of this kind; `sizes` are seq_length and vocab_size."""
        shared = (
            self.kv_heads
            if heads > self.kv_heads and self.kv_heads and heads % self.kv_heads == 0
            else None
        )
        wide = (self.ffn if shared or not self.kv_heads else self.ffn_alone) * hidden
        step = TILE * (8 if wide >= 64 * TILE else 2)  # large ones are cut by up to 8 GPUs
        ffn = max(int(np.ceil(wide / step)) * step, hidden) if wide else None
        rest: dict[str, Any] = {
            "num_key_value_heads": shared,
            "ffn_hidden_size": ffn,
            **self.fields,
            **sizes,
        }
        return ModelShape(num_layers=1, hidden_size=hidden, num_attention_heads=heads, **rest)


def kind_of(like: str, seq_length: int) -> Kind:
    """The kind of that name, or that of the model in a JSON file (a shape, or a config.json), its
    ratios kept.
    """
    # Llama 3 (arXiv:2407.21783, table 3): 8 key-value heads, an MLP of 3.5 h at 8B and 70B; its
    # predecessors without shared heads had 8/3 h (arXiv:2302.13971, section 2.2)
    llama = {
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "positions": "rotary",
        "biases": "none",
    }
    kinds = {
        "gpt2": Kind(),
        "bloom": Kind(fields={"positions": "alibi", "embedding_layernorm": True}),
        "llama": Kind(
            fields={**llama, "tied_embeddings": False}, kv_heads=8, ffn=3.5, ffn_alone=8 / 3
        ),
    }
    if not like.endswith(".json"):
        require_known("like", like, kinds)
        return kinds[like]
    shape = read_shape(like, seq_length=seq_length).shape
    ratio = shape.ffn / shape.hidden_size if shape.ffn_hidden_size or shape.is_gated else 0.0
    fields = {
        name: getattr(shape, name) for name in (*llama, "tied_embeddings", "embedding_layernorm")
    }
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
        if isinstance(self.tokens, str) and not self.tokens.endswith("x"):
            object.__setattr__(self, "tokens", parse_count("tokens", self.tokens))
        elif not isinstance(self.tokens, str):
            require_positive("tokens", self.tokens)
        require_positive("params", self.parameters)
        require(
            self.parameters <= MOST, "params", f"{self.parameters:g}", f"must be at most {MOST:g}"
        )
        rule = f"{self.cluster.name} has {self.cluster.max_gpus}"
        require(self.gpus <= self.cluster.max_gpus, "gpus", self.gpus, rule)
        iteration = self.gbs * self.seq_length
        rule = f"one iteration takes gbs x seq_length = {iteration}"
        require(self.tokens_of(self.parameters) >= iteration, "tokens", self.tokens, rule)
        rule = f"at every usual width an embedding of {self.vocabulary} tokens nearly reaches that size; ask for more"
        require(bool(self.widths()), "params", f"{self.parameters:g}", rule)

    @property
    def engines(self) -> tuple[str, ...]:
        """What may train it."""
        return ENGINES if self.engine == ANY else (self.engine,)

    def tokens_of(self, parameters: float) -> float:
        """Tokens to train so many parameters on."""
        return (
            parse_count("tokens", self.tokens[:-1]) * parameters
            if isinstance(self.tokens, str)
            else self.tokens
        )

    @property
    def tokens_text(self) -> str:
        """The tokens in words."""
        return (
            f"{self.tokens[:-1]} a parameter"
            if isinstance(self.tokens, str)
            else f"{self.tokens / 1e9:g} B"
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of 128, which every tp up to
        128 divides.
        """
        return padded_vocab_size(self.vocabulary)

    def to_json(self) -> dict[str, Any]:
        """What is asked, the cluster by its name."""
        asked = {
            name: value for name, value in vars(self).items() if name not in ("calibration", "kind")
        }
        return {**asked, "cluster": self.cluster.name, "vocab_size": self.vocab_size}

    @cached_property
    def kind(self) -> Kind:
        """What all shapes have in common."""
        return kind_of(self.like, self.seq_length)

    def layer(self, hidden: int) -> ModelShape | None:
        """One layer of that width, its heads nearest to a head size of 128; None where no number of
        heads fits.
        """
        heads = usable_heads(hidden, min(self.cluster.gpus_per_node, self.gpus)) or usable_heads(
            hidden, 1
        )
        sizes = {"vocab_size": self.vocab_size, "seq_length": self.seq_length}
        return self.kind.shape(hidden, heads[0], **sizes) if heads else None

    def widths(self) -> list[int]:
        """Hidden sizes between the published ratios, at most ten: multiples of 64, 128, 256, 512,
        ...
        """
        # hidden / layers: the prequel's table has 109 to 195 (530B) above 100B, and 204 in what it
        # trained; below 20B they are narrower: 64 (GPT-2, 12 x 768) to 128 (GPT-3 13B, 40 x 5140;
        # arXiv:2005.14165, table 2.1)
        low, high = (100.0, 250.0) if self.parameters >= 20e9 else (48.0, 160.0)
        highest = (self.parameters * high / 12) ** (
            1 / 3
        )  # all parameters in layers of that ratio, of 12 h^2
        step = TILE if highest > 8 * TILE else TILE // 2
        found = []
        for h in range(step, int(highest) + 1, step):
            if one := self.layer(h):
                embeddings = one.embedding_parameters * (1 if one.tied_embeddings else 2)
                layers = (self.parameters - embeddings) / one.layer_weights
                found += [h] if layers >= 1 and low <= h / layers <= high else []
        while len(found) > 10:
            step *= 2
            found = [h for h in found if h % step == 0]
        return found

    def shapes(self) -> list[ModelShape]:
        """Every depth of every width within the tolerance, or the nearest where no depth comes so
        near (few layers).
        """
        found = []
        for one in filter(None, map(self.layer, self.widths())):
            exact = (self.parameters - one.parameters) / one.layer_parameters + 1
            margin = self.tolerance * self.parameters / one.layer_parameters
            depths = range(max(1, int(np.ceil(exact - margin))), int(np.floor(exact + margin)) + 1)
            found += [
                dataclasses.replace(one, num_layers=n) for n in depths or [max(1, round(exact))]
            ]
        return found


def usable_heads(hidden: int, most_tp: int) -> list[int]:
    """Numbers of heads whose size is a multiple of 8 from 64 (GPT-2) to 256, and that `most_tp`
    ranks can share.

    The one whose head size is nearest to 128 comes first. Published are sizes up to 224 (the
    prequel's 14336 / 64).
    """
    counts = (
        a
        for a in range(most_tp, hidden // 64 + 1, most_tp)
        if hidden % (8 * a) == 0 and hidden // a <= 256
    )
    return sorted(counts, key=lambda a: (abs(hidden // a - 128), a))
