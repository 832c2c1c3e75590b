"""Every topology of a cluster: the ranked candidates, and the refused ones with their reasons."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trilane.calibration import Calibration
from trilane.hardware import Cluster
from trilane.prediction import Prediction, predict
from trilane.shape import ModelShape
from trilane.topology import Topology, refusal

OOM_LIMIT = 0.5


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A topology and what is expected of it."""

    topology: Topology
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Candidates from the fastest to the slowest; refused topologies with one reason each."""

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[Topology, str], ...]

    @property
    def evaluated(self) -> int:
        """Topologies that were looked at."""
        return len(self.candidates) + len(self.refused)

    @property
    def refused_by_rule(self) -> dict[str, int]:
        """How many topologies each rule refused, the most frequent first."""
        return dict(Counter(reason.partition(": ")[2] for _, reason in self.refused).most_common())

    def best_lanes(self, count: int) -> list[Candidate]:
        """The `count` fastest candidates that differ in tp, pp or dp, each with its best microbatch size."""
        best: dict[tuple[int, int, int], Candidate] = {}
        for candidate in self.candidates:
            t = candidate.topology
            best.setdefault((t.tp, t.pp, t.dp), candidate)
        return list(best.values())[:count]


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def lanes(gpus: int) -> Iterator[tuple[int, int, int]]:
    """Every (tp, pp, dp) whose product is `gpus`."""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            yield tp, pp, gpus // tp // pp


def topologies(gpu_counts: Iterable[int], gbs: int, mbs: Sequence[int], base: Topology) -> Iterator[Topology]:
    """Every topology of those GPU counts and microbatch sizes; the other choices are taken from `base`."""
    for gpus in gpu_counts:
        for tp, pp, dp in lanes(gpus):
            for size in mbs:
                if gbs % (size * dp) == 0:
                    yield replace(base, tp=tp, pp=pp, dp=dp, mbs=size, gbs=gbs)


def search(
    shape: ModelShape,
    cluster: Cluster,
    *,
    gpus: Sequence[int],
    gbs: int,
    mbs: Sequence[int],
    calibration: Calibration,
    base: Topology | None = None,
) -> SearchResult:
    """Predict every topology of `gpus` GPUs (one or more counts) and microbatch sizes `mbs` for `gbs` sequences."""
    candidates, refused = [], []
    for topology in topologies(gpus, gbs, mbs, base or Topology()):
        reason = refusal(shape, topology) or placement_refusal(topology, cluster)
        if reason is None:
            prediction = predict(shape, topology, cluster, calibration)
            if prediction.oom_probability <= OOM_LIMIT:
                candidates.append(Candidate(topology=topology, prediction=prediction))
                continue
            need, have = prediction.memory_bytes / 2**30, cluster.gpu.memory_bytes / 2**30
            reason = f"memory={need:.1f} GiB: must fit the {have:.1f} GiB of a {cluster.gpu.name}"
        refused.append((topology, reason))
    ranked = sorted(candidates, key=lambda c: c.prediction.sec_per_it)
    return SearchResult(candidates=tuple(ranked), refused=tuple(refused))


def placement_refusal(topology: Topology, cluster: Cluster) -> str | None:
    """Why a topology has no sensible place on the cluster's nodes; None where it has."""
    if topology.gpus > cluster.max_gpus:
        return f"gpus={topology.gpus}: {cluster.name} has {cluster.max_gpus}"
    if topology.tp > cluster.gpus_per_node:
        return f"tp={topology.tp}: a tensor-parallel group must stay inside a node of {cluster.gpus_per_node} GPUs"
    return None
