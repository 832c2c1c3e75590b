"""Calibration: the constants of one cluster and engine, what they were fitted to, and how far predictions scatter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.cluster import cluster as catalogued
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.costmodel.constants import BOUNDS, GIVEN, Bound, Constants
from trilane.utils.validation import (
    DATA,
    from_mapping,
    read_json,
    require,
    require_integer,
    require_known,
    require_line,
    require_positive,
    to_mapping,
)
from trilane.workspace.study import Study

# Seconds that CUDA_LAUNCH_BLOCKING=1 adds to a layer's waits: the chronicles print 91.04 against 97.20 TFLOPs on 80
# GPUs (3.5 ms a layer and microbatch) and no difference on 160; the A100 fit has 5.0 ms with it and 3.0 ms without.
BLOCKED_LAUNCH_S = 2e-3
ASYNCHRONOUS = "asynchronous launches"  # how the name of the regime without it begins
WIDEST = 200.0  # half-width of an interval of ln(seconds), far from where exp() overflows
FACTOR = Bound(0.5, 0.8, 0.002, 1.5)  # of what a regime leaves of a constant


# Which constants two fits share: of the card's kernels, of the cluster's networks, of the software.
KERNELS = ("matmul", "prologue", "quantization", "memory", "misaligned", "crowding", "flash")
NETWORKS = ("node", "network", "p2p")
SOFTWARE = ("launch_s", "skew_s", "handoff_s", "pressure", "exposed", "passes", "host_s")
HOPPER = (9, 0)  # compute capability of the newest cards with measured rows
EARLIER = {"megatron-deepspeed-2024": "megatron-deepspeed"}  # a stack that grew out of another one starts from it
# What a stack does: Megatron-LM sent whole activations between stages before its scatter-gather of 2021 (Narayanan et
# al. 2021, section 4.1), as OneFlow did; Megatron-Core's distributed optimizer and PyTorch's FSDP scatter gradients and
# hide most of it under computation (their guides); DeepSpeed's ZeRO prefetches.
STACK_CONSTANTS: dict[str, dict[str, float]] = {
    "megatron-lm": {"whole_p2p": 1.0},
    "oneflow": {"whole_p2p": 1.0},
    "megatron-core": {"reduce_scatter": 1.0, "overlap": 0.6, "exposed": 0.3},
    "fsdp": {"reduce_scatter": 1.0, "exposed": 0.4},
    "deepspeed-zero": {"exposed": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Days (and sizes of jobs, where given) on which some constants were others: a covariate, not noise.

    `factor` multiplies the constants named; a plan of today is in none of them.
    """

    name: str
    constants: tuple[str, ...]
    first_day: str
    last_day: str
    gpus: tuple[int, ...] = ()
    factor: float = FACTOR.prior

    def __post_init__(self) -> None:
        for name in self.constants:
            require_known("regime.constants", name, BOUNDS)

    def applies(self, day: str, gpus: float) -> bool:
        """Whether a run of that ISO date on that many GPUs was in this regime."""
        return bool(day) and self.first_day <= day <= self.last_day and (not self.gpus or gpus in self.gpus)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run to be predicted: what ran where, in which engine, and on which ISO day ("" where unknown).

    `engine` "" is Megatron-DeepSpeed as the documents of the measured rows used it.
    """

    shape: ModelShape
    topology: Topology
    cluster: Cluster
    day: str = ""
    engine: str = ""


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The sizes of a run by which its distance to another is measured (predict.SPANS); `tokens` of a microbatch."""

    hidden: float
    layers: float
    seq: float
    tokens: float
    gpus: float
    tp: float
    pp: float
    microbatches: float

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            require_positive(f"calibration.own.{name}", size)


@dataclass(frozen=True, kw_only=True)
class Calibration(Constants):
    """The constants of constants.py, fitted; `half_width` is the 90 % interval's, of ln(seconds); `rows` fitted to.

    `stack` is the software whose shipped rows they are; "" for rows of one's own, whose sizes are in `own`, or none.
    Raises ValueError for a constant outside its physical bound.
    """

    half_width: float = 0.15
    rows: int = 0
    regimes: tuple[Regime, ...] = ()
    stack: str = ""
    own: tuple[RunSizes, ...] = ()

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            rule = f"must lie between {bound.low} and {bound.high}"
            require(bound.low * 0.999 <= value <= bound.high * 1.001, f"calibration.{name}", value, rule)
        require_positive("calibration.half_width", self.half_width)
        require(self.half_width <= WIDEST, "calibration.half_width", self.half_width, f"must be at most {WIDEST:g}")
        require_integer("calibration.rows", self.rows, 0)
        require_line("calibration.stack", self.stack)
        for name in GIVEN:
            require(0 <= getattr(self, name) <= 1, f"calibration.{name}", getattr(self, name), "must lie in 0 to 1")

    def on(self, day: str, gpus: int) -> "Calibration":
        """The calibration of one day: the factors of its regimes applied."""
        values = {name: getattr(self, name) for name in BOUNDS}
        for regime in self.regimes:
            if regime.applies(day, gpus):
                for name in regime.constants:
                    values[name] = max(values[name] * regime.factor, BOUNDS[name].low)
        return replace(self, **values)

    def with_launch_blocking(self, blocking: bool) -> "Calibration":
        """The constants with CUDA_LAUNCH_BLOCKING=1, or without it.

        The shipped A100 constants come from runs that blocked, with a regime of days that did not; others are without.
        """
        free = next((r for r in self.regimes if r.name.startswith(ASYNCHRONOUS)), None)
        if free:
            factors = {name: getattr(self, name) * free.factor for name in free.constants}
            return self if blocking else replace(self, **factors)
        slower = min(self.launch_s + BLOCKED_LAUNCH_S, BOUNDS["launch_s"].high)
        return replace(self, launch_s=slower) if blocking else self

    def record(self) -> dict[str, Any]:
        """{"calibration": ...}: the constants that made predictions, for a result file."""
        return {"calibration": to_json(self)}

    def interval(self, seconds: Any) -> tuple[Any, Any]:
        """The 90 % interval around a predicted time, or around an array of them."""
        factor = math.exp(self.half_width)
        return seconds / factor, seconds * factor


def default(cluster: Cluster, stack: str = "") -> Calibration:
    """What is assumed before the first measured row of one's own.

    The shipped fit of that cluster and software stack, or of the cluster if no stack is given; else what fits of the
    card, the cluster and the stack have in common (see combined). Without any: what A100 and V100 rows agree on, with
    waiting times of a well-kept system.
    """
    shipped = _shipped("calibrations")
    if (name := f"{cluster.name}/{stack}" if stack else cluster.name) in shipped:
        return from_json(shipped[name])
    if cluster.gpu.kind == "cpu":
        # one layer starts about 90 torch operations forward and backward, and a third more with recomputation
        launch = min(max(120 * cluster.launch_overhead_s, BOUNDS["launch_s"].low), BOUNDS["launch_s"].high)
        return Calibration(matmul=0.9, launch_s=launch, half_width=0.4)
    fits = []
    for name in (name for name in shipped if "/" in name):
        fitted, _, other = name.partition("/")
        fits.append(Fit(cluster=catalogued(fitted), stack=other, calibration=from_json(shipped[name])))
    return combined(cluster, stack, fits)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A calibration of one cluster and software stack."""

    cluster: Cluster
    stack: str
    calibration: Calibration


def combined(cluster: Cluster, stack: str, fits: Sequence[Fit]) -> Calibration:
    """The constants of a cluster and stack without rows: the part of each fit that is shared with them.

    Kernels' constants come from fits of the same generation of cards (one after the H100 counts as an H100), those of
    the networks from fits of the same cluster, those of the software (launches not blocked) from fits of the same stack
    or an EARLIER one: geometric means, weighted by 1 / half_width^2. What no fit shares is that of a well-kept system,
    and what is known of a stack is in STACK_CONSTANTS. Of a stack without fits `passes` on an H100 is that measured
    there: the 1.0 of a well-kept system comes from slower cards. `rows` is 0: nothing was fitted, so a refit may move
    all as far as priors allow.
    """
    generation = min(cluster.gpu.compute_capability, HOPPER)
    hopper = generation == HOPPER
    base = from_json(_shipped("calibrations")["hopper" if hopper else "transferable"])
    if not stack and not hopper:
        return base
    values: dict[str, Any] = {}
    like = stack if stack in (fit.stack for fit in fits) else EARLIER.get(stack, stack)
    kernels = (*KERNELS, "passes") if hopper else KERNELS
    for names, is_shared in (
        (kernels, lambda fit: min(fit.cluster.gpu.compute_capability, HOPPER) == generation),
        (NETWORKS, lambda fit: stack and fit.cluster.name == cluster.name),
        (SOFTWARE, lambda fit: fit.stack == like),
    ):
        for name in names:
            shared = [f.calibration.with_launch_blocking(False) for f in fits if is_shared(f)]
            if shared:
                weights = [k.half_width**-2 for k in shared]
                logs = [w * math.log(getattr(k, name)) for w, k in zip(weights, shared, strict=True)]
                values[name] = math.exp(sum(logs) / sum(weights))
    given = dict.fromkeys(GIVEN, 0.0) | STACK_CONSTANTS[stack] if stack in STACK_CONSTANTS else {}
    return replace(base, **{**given, **values, "regimes": shipped_regimes(cluster.name)})


def prior_of(cluster: str, stack: str) -> Calibration:
    """The priors of constants.py for rows of that cluster and stack: its days' regimes, and what the stack does."""
    values: dict[str, Any] = {**STACK_CONSTANTS.get(stack, {}), "regimes": shipped_regimes(cluster), "stack": stack}
    return Calibration(**values)


def shipped_regimes(cluster: str) -> tuple[Regime, ...]:
    """The regimes of a cluster of the measured rows, their factors at the prior."""
    return tuple(from_mapping(Regime, r, "regime") for r in _shipped("regimes").get(cluster, []))


def _shipped(name: str) -> dict[str, Any]:
    return read_json(DATA / f"{name}.json", name)


def to_json(calibration: Calibration) -> dict[str, Any]:
    """The calibration as a JSON object; `regimes`, `stack` and `own` only where it has some."""
    values = to_mapping(calibration)
    return {k: v for k, v in values.items() if v or k not in ("regimes", "stack", "own")}


def from_json(values: object) -> Calibration:
    """The calibration of a JSON object; ValueError names a wrong field."""
    return from_mapping(Calibration, values, "calibration")


def load(path: Path | str) -> Calibration:
    """The calibration in a JSON file; ValueError where it is missing, malformed or outside the bounds."""
    return from_json(read_json(path, "calibration"))


def calibration_for(cluster: Cluster, source: str = "") -> Calibration:
    """The constants to predict by: those that ship for the cluster (""), or for a software stack on it (of stacks()),
    those in a JSON file, or those that 04_analyze fitted in a study.
    """
    if not source or source in stacks():
        return default(cluster, source)
    if source.endswith(".json") or Path(source).is_file():
        return load(source)
    found = Study(source)
    rule = f"is neither a study, nor a JSON file, nor one of the stacks {', '.join(stacks())}"
    require(found.folder.is_dir(), "calibration", source, rule)
    return from_json(found.values("calibration.json", "04_analyze"))


def stacks() -> list[str]:
    """The software stacks of which something is known: fitted to rows, or a habit."""
    fitted = (name.partition("/")[2] for name in _shipped("calibrations") if "/" in name)
    return sorted({*fitted, *STACK_CONSTANTS})
