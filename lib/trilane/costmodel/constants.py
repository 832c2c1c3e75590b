"""Constants: the few numbers of the time model that peaks alone do not give, each inside a physical
bound.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from trilane.utils.validation import shipped_json


def card_facts(name: str) -> dict[str, Any]:
    """What was measured of a card (data/cards.json, with sources): of a constant its prior and the
    deviation of its logarithm; nothing of a card that is not there.
    """
    found: dict[str, Any] = shipped_json("cards")["cards"].get(name.partition("-")[0], {})
    return found


class Bound(NamedTuple):
    """Where a constant may lie: its prior, the standard deviation of the prior's logarithm, and
    hard limits.

    `shared` are the shares of that variance that two fits have in common if they are of the same
    generation of cards, of the same cluster, and of the same software stack; the rest is of each
    fit alone. Our choices.
    """

    prior: float
    deviation: float
    low: float
    high: float
    shared: tuple[float, float, float] = (0.0, 0.0, 0.0)


def _fitted(
    prior: float, deviation: float, low: float, high: float, *, of: tuple[float, float, float]
) -> Any:
    return field(default=prior, metadata={"bound": Bound(prior, deviation, low, high, of)})


# What a constant belongs to: the card's kernels, the cluster's networks, or the software.
CARD = (0.4, 0.0, 0.1)
NETWORK = (0.0, 0.8, 0.0)
SOFTWARE = (0.0, 0.0, 0.3)


@dataclass(frozen=True, kw_only=True)
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

    # An efficiency cannot pass its peak; a waiting time cannot be negative. Priors: cuBLAS reaches
    # 0.75-0.85 of the peak on large matmuls (NVIDIA, 'Matrix multiplication background'), STREAM
    # 0.85 of the memory's rate, nccl-tests 0.75 of NVLink's, and half to three quarters of the
    # network's. Waits: tens of microseconds a kernel. Flash attention: Dao 2023, arXiv:2307.08691,
    # figures 5 to 7, 50-73 % of an A100's peak forward, less backward. Host: some 120 operations of
    # about 12 microseconds each for a layer, forward and backward.
    matmul: float = _fitted(0.79, 0.06, 0.10, 0.98, of=CARD)
    prologue: float = _fitted(125, 0.3, 1, 2000, of=CARD)
    quantization: float = _fitted(0.60, 0.25, 0.05, 1.0, of=CARD)
    memory: float = _fitted(0.81, 0.07, 0.1, 1.0, of=CARD)
    node: float = _fitted(0.77, 0.15, 0.02, 1.0, of=NETWORK)
    network: float = _fitted(0.60, 0.5, 0.001, 1.0, of=NETWORK)
    p2p: float = _fitted(0.80, 0.5, 0.001, 1.0, of=NETWORK)
    misaligned: float = _fitted(0.60, 0.15, 0.1, 1.0, of=CARD)
    crowding: float = _fitted(0.10, 0.3, 0.005, 0.2, of=CARD)
    launch_s: float = _fitted(4e-4, 1.2, 1e-5, 2e-2, of=SOFTWARE)
    skew_s: float = _fitted(1e-4, 1.2, 1e-6, 1e-2, of=SOFTWARE)
    handoff_s: float = _fitted(7e-4, 1.2, 1e-6, 1e-1, of=SOFTWARE)
    pressure: float = _fitted(0.05, 0.7, 1e-4, 0.2, of=SOFTWARE)
    flash: float = _fitted(0.50, 0.2, 0.1, 0.9, of=CARD)
    exposed: float = _fitted(0.4, 0.5, 0.02, 1.0, of=SOFTWARE)
    passes: float = _fitted(1.0, 0.25, 0.5, 5.0, of=(0.3, 0.0, 0.4))
    host_s: float = _fitted(1.5e-3, 0.5, 1e-5, 2e-2, of=SOFTWARE)
    distance: float = _fitted(0.05, 0.7, 1e-4, 1.0, of=NETWORK)
    pace: float = _fitted(1.0, 0.08, 0.3, 3.0, of=(0.0, 0.5, 0.1))
    overlap: float = 0.6
    whole_p2p: float = 0.0
    reduce_scatter: float = 0.0


BOUNDS: dict[str, Bound] = {f.name: f.metadata["bound"] for f in fields(Constants) if f.metadata}
GIVEN = tuple(
    f.name for f in fields(Constants) if not f.metadata
)  # what a stack does, and no fit finds
