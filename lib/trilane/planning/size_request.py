"""What a sizing asks for: parameters, the machine, the kind of shape; and the candidate shapes that
follow from it.
"""

import dataclasses
import math
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.options import check, option
from trilane.config.parallelism import LARGEST
from trilane.costmodel.shipped import calibration_for
from trilane.forecasting.failures import FailureModel
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, Record
from trilane.utils.validation import parse_count, require, require_positive, shipped_json

# NVIDIA, 'Matrix multiplication background', tile quantization; the prequel: nhidden % 128 = 0
TILE = 128
ANY = "any"  # engine
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
KINDS: dict[str, dict[str, Any]] = shipped_json("kinds")


def one_layer(like: str, hidden: int, heads: int, **sizes: int) -> ModelShape:
    """One layer of a kind of model; `sizes` are seq_length and vocab_size."""
    kind = dict(KINDS[like])
    if like == "llama":
        is_shared = heads > 8 and heads % 8 == 0
        width = (3.5 if is_shared else 8 / 3) * hidden
        # whole tiles; large ones are cut by up to 8 GPUs
        step = (8 if width >= 64 * TILE else 2) * TILE
        kind["ffn_hidden_size"] = math.ceil(width / step) * step
        if is_shared:
            kind["num_key_value_heads"] = 8
    kind |= sizes
    return ModelShape(num_layers=1, hidden_size=hidden, num_attention_heads=heads, **kind)


@frozen
class SizeRequest(Record):
    """What is asked: a number of parameters, the machine, and how much is to be trained with what.

    `choices` pins what each shape's search would vary, or sets what it holds fixed (see
    planning.search.search).
    `tokens` is a number, or a text such as "300B" or "20x", so many for each parameter.
    """

    parameters: float = option(cli=False, above=0, maximum=MOST)
    # that of GPT-2
    vocabulary: int = option(
        50257, "tokens of the vocabulary; padded to a multiple of 128", minimum=1, name="vocab"
    )
    gpus: int = option(help="GPUs of the run", minimum=1)
    cluster: Cluster = option(cli=False)
    # or a Calibration
    calibration: Any = option(
        "", "constants: a study, a JSON file or a software stack", metavar="SOURCE"
    )
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
    like: str = option("gpt2", "the kind of model", choices=tuple(KINDS))
    spare_nodes: int | None = option(
        None, "nodes in reserve (default: 4, or what the jobs leave free)"
    )
    price: float | None = option(None, "price of one GPU-hour, in your currency")
    choices: dict[str, Any] = option(dict, cli=False)

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "calibration", calibration_for(self.cluster, self.calibration))
        if isinstance(self.tokens, str):
            if not self.tokens.endswith("x"):
                object.__setattr__(self, "tokens", parse_count("tokens", self.tokens))
        else:
            require_positive("tokens", self.tokens)
        self.cluster.require_spares(self.spare_nodes, self.gpus)
        iteration = self.gbs * self.seq_length
        rule = f"one iteration takes gbs x seq_length = {iteration}"
        require(self.tokens_of(self.parameters) >= iteration, "tokens", self.tokens, rule)
        rule = f"an embedding of {self.vocabulary} tokens nearly reaches that size; ask for more"
        require(bool(self.widths()), "params", f"{self.parameters:g}", rule)

    def tokens_of(self, parameters: float) -> float:
        """Tokens to train so many parameters on."""
        if isinstance(self.tokens, str):
            return parse_count("tokens", self.tokens[:-1]) * parameters
        return self.tokens

    @property
    def assumed(self) -> str:
        """What the days of a training count."""
        risks = FailureModel(spare_nodes=self.spare_nodes)
        spares = risks.spares_text(self.cluster.free_nodes(self.gpus))
        return f"Days are those of 'plan calendar', with {spares}, without a ramp and a queue."

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary padded to a multiple of 128, which every tp up to
        128 divides.
        """
        return padded_vocab_size(self.vocabulary)

    def to_json(self) -> Json:
        """What is asked, the cluster by its name."""
        asked = {**vars(self), "cluster": self.cluster.name, "vocab_size": self.vocab_size}
        del asked["calibration"]
        return asked

    def layer(self, hidden: int) -> ModelShape | None:
        """One layer of that width, its heads nearest to a head size of 128; None where no number of
        heads fits.
        """
        node = min(self.cluster.gpus_per_node, self.gpus)
        heads = usable_heads(hidden, node) or usable_heads(hidden, 1)
        if not heads:
            return None
        sizes = {"vocab_size": self.vocab_size, "seq_length": self.seq_length}
        return one_layer(self.like, hidden, heads[0], **sizes)

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
