"""Constants: the few numbers of the time model that peaks alone do not give, each inside a physical
bound.
"""

from dataclasses import field, fields
from typing import Any, NamedTuple

from trilane.config.cluster import Gpu, card_words
from trilane.utils.frozen import frozen
from trilane.utils.validation import shipped_json


def card_facts(gpu: Gpu) -> dict[str, Any]:
    """What was measured of a card (data/cards.json, with sources): of a constant its prior and the
    deviation of its logarithm, 0.1 where it has none; of a card that is not there those of "other".
    The card's own shares come first.
    """
    cards = shipped_json("cards")["cards"]
    names = [name for name in cards if name in card_words(gpu.name)] or ["other"]
    known = cards[names[0]] | (gpu.shares or {})
    facts = {}
    for name, value in known.items():
        facts[name] = value if isinstance(value, list | tuple) else (value, 0.1)
    return facts


class Bound(NamedTuple):
    """Where a constant may lie: its prior, the standard deviation of the prior's logarithm, and
    hard limits.

    `shared` are the shares of that variance that two fits have in common if they are of the same
    generation of cards, of the same cluster, and of the same software stack; the rest is of each
    fit alone: of the card's kernels, the cluster's networks, or the software. Our choices, with
    the sources of the priors in data/priors.json.
    """

    prior: float
    deviation: float
    low: float
    high: float
    shared: tuple[float, float, float] = (0.0, 0.0, 0.0)


def _prior(name: str) -> Any:
    bound = Bound(*shipped_json("priors")["constants"][name])
    return field(default=bound.prior, metadata={"bound": bound})


@frozen
class Constants:
    """Numbers, or in a fit arrays with one entry a row, where rows were measured under different
    conditions.

    matmul        share of the peak rate that a large, whole-tile matmul reaches
    prologue      depth K at which a tile's prologue and epilogue take as long as its main loop
    quantization  share of the last, incomplete wave of tiles that is really lost
    memory        share of the memory's peak rate that element-wise kernels reach
    node          share of the node bus that an all-reduce reaches
    network       share of a node's network that gradient reduction and parameter gathering reach
    p2p           the same for activations between pipeline stages
    misaligned    share of the fp32 peak that attention reaches where head_dim % 8 != 0 shuts the
                  tensor cores out
    crowding      exponent by which those attention kernels slow down with the heads in flight
                  (cause unknown)
    launch_s      seconds per layer and microbatch that kernels wait for their launch
    skew_s        seconds per all-reduce over 8 GPUs waiting for the last of them
    handoff_s     seconds per microbatch and stage boundary for meeting the neighbour
    pressure      relative slowdown when the caching allocator has no memory left to cache in
    flash         share of the peak that a flash attention kernel reaches
    exposed       share of the gradient and parameter traffic that overlaps with computation and
                  still does not hide
    passes        bytes that element-wise kernels move, over those of fused ones
    host_s        seconds in which the host launches one layer's kernels, forward and backward
    overlap       given: share of the tensor-parallel (where it overlaps) and interleaved pipeline
                  traffic that hides
    whole_p2p     given: 1 where each tensor-parallel rank sends the whole activation to the next
                  stage
    reduce_scatter  given: 1 where ZeRO scatters gradients, 0 where it all-reduces them (DeepSpeed's
                    pipeline of 2022)
    """

    matmul: float = _prior("matmul")
    prologue: float = _prior("prologue")
    quantization: float = _prior("quantization")
    memory: float = _prior("memory")
    node: float = _prior("node")
    network: float = _prior("network")
    p2p: float = _prior("p2p")
    misaligned: float = _prior("misaligned")
    crowding: float = _prior("crowding")
    launch_s: float = _prior("launch_s")
    skew_s: float = _prior("skew_s")
    handoff_s: float = _prior("handoff_s")
    pressure: float = _prior("pressure")
    flash: float = _prior("flash")
    exposed: float = _prior("exposed")
    passes: float = _prior("passes")
    host_s: float = _prior("host_s")
    distance: float = _prior("distance")
    pace: float = _prior("pace")
    overlap: float = 0.6
    whole_p2p: float = 0.0
    reduce_scatter: float = 0.0


BOUNDS: dict[str, Bound] = {f.name: f.metadata["bound"] for f in fields(Constants) if f.metadata}
GIVEN = tuple(
    f.name for f in fields(Constants) if not f.metadata
)  # what a stack does, and no fit finds
