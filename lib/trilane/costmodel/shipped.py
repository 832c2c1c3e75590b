"""The constants that ship: what is assumed of a cluster and a software stack before any row of one's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.cluster import cluster as catalogued
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration, Configuration, Regime, from_json, load, whole
from trilane.costmodel.constants import BOUNDS, GIVEN
from trilane.utils.validation import DATA, from_mapping, read_json, require, shipped_json
from trilane.workspace.study import Study


def stack_table() -> dict[str, Any]:
    """The software stacks: `engines`, or sets of rows, that belong to each, and the `constants` that are its habits."""
    return shipped_json("stacks")["stacks"]


def habits(stack: str) -> dict[str, float]:
    """The constants that a stack is known to have."""
    return stack_table().get(stack, {}).get("constants", {})


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
    or the one before it: geometric means, weighted by 1 / half_width^2. What no fit shares is that of a well-kept
    system, and what is known of a stack is in data/stacks.json. Of a stack without fits `passes` on an H100 is that
    measured there: the 1.0 of a well-kept system comes from slower cards. `rows` is 0: nothing was fitted, so a refit
    may move all as far as priors allow.
    """
    newest = (9, 0)  # compute capability of the newest cards with measured rows
    generation = min(cluster.gpu.compute_capability, newest)
    hopper = generation == newest
    base = from_json(_shipped("calibrations")["hopper" if hopper else "transferable"])
    if not stack and not hopper:
        return base
    values: dict[str, Any] = {}
    # a stack that grew out of another one starts from it
    is_later = stack == "megatron-deepspeed-2024" and stack not in (fit.stack for fit in fits)
    like = "megatron-deepspeed" if is_later else stack
    # which constants two fits share: of the card's kernels, of the cluster's networks, of the software
    kernels = ("matmul", "prologue", "quantization", "memory", "misaligned", "crowding", "flash")
    software = ("launch_s", "skew_s", "handoff_s", "pressure", "exposed", "passes", "host_s")
    for names, is_shared in (
        (kernels + ("passes",) * hopper, lambda fit: min(fit.cluster.gpu.compute_capability, newest) == generation),
        (("node", "network", "p2p"), lambda fit: stack and fit.cluster.name == cluster.name),
        (software, lambda fit: fit.stack == like),
    ):
        for name in names:
            shared = [f.calibration.without_launch_blocking() for f in fits if is_shared(f)]
            if shared:
                weights = [k.half_width**-2 for k in shared]
                logs = [w * math.log(getattr(k, name)) for w, k in zip(weights, shared, strict=True)]
                values[name] = math.exp(sum(logs) / sum(weights))
    given = dict.fromkeys(GIVEN, 0.0) | habits(stack) if habits(stack) else {}
    return replace(base, **{**given, **values, "regimes": shipped_regimes(cluster.name)})


def prior_of(cluster: str, stack: str) -> Calibration:
    """The priors of constants.py for rows of that cluster and stack: its days' regimes, and what the stack does."""
    values: dict[str, Any] = {**habits(stack), "regimes": shipped_regimes(cluster), "stack": stack}
    return Calibration(**values)


def shipped_regimes(cluster: str) -> tuple[Regime, ...]:
    """The regimes of a cluster of the measured rows, their factors at the prior."""
    return tuple(from_mapping(Regime, r, "regime") for r in _shipped("regimes").get(cluster, []))


def _shipped(name: str) -> dict[str, Any]:
    return read_json(DATA / f"{name}.json", name)


def calibration_for(cluster: Cluster, source: str = "") -> Calibration:
    """The constants to predict by: those that ship for the cluster (""), or for a software stack on it (of stacks()),
    those in a JSON file, or those that 04_analyze fitted in a study. ValueError for those of another card.

        calibration_for(load_cluster("jz-a100-80g"), "megatron-core")
    """
    return replace(_found(cluster, source), name=source or cluster.name).on_card(cluster)


def _found(cluster: Cluster, source: str) -> Calibration:
    if not source or source in stacks():
        return default(cluster, source)
    if source.endswith(".json") or Path(source).is_file():
        return load(source)
    study = Study(source)
    rule = f"is neither a study, nor a JSON file, nor one of the stacks {', '.join(stacks())}"
    require(study.folder.is_dir(), "calibration", source, rule)
    return whole(study.values("calibration.json", "04_analyze"), source)


def constants_of(plan: Plan | Configuration, source: str = "", cluster: Cluster | None = None) -> Calibration:
    """The constants for a plan: those of `source`, where given, as calibration_for() takes it; else those that the plan
    carries, which predicted it; else the cluster's. On nodes of another `cluster` those of that.

        constants_of(read_plan("plan.json")).hash
    """
    kept = plan.calibration if isinstance(plan, Plan) else None
    machine = cluster or plan.cluster
    if source or kept is None or machine.name != plan.cluster.name:
        return calibration_for(machine, source)
    return replace(whole(kept["constants"], kept["name"]), name=kept["name"]).on_card(plan.cluster)


def replaced(plan: Plan, used: Calibration) -> list[str]:
    """A line where other constants than those that the plan carries are used, and one where another cluster's are."""
    kept, lines = plan.calibration, foreign(used, plan.cluster)
    if kept and kept["hash"] != used.hash:
        instead = f"{used.hash} instead of {kept['name']} ({kept['hash']}), which predicted the plan"
        lines = [f"calibration={used.name}: {instead}", *lines]
    return lines


def foreign(used: Calibration, cluster: Cluster) -> list[str]:
    """A warning where the constants were fitted to rows of another cluster with the same card."""
    is_own = used.cluster in ("", cluster.name) and used.card in ("", cluster.gpu.name)
    rows = f"{used.cluster} ({used.card}), not of {cluster.name}"
    return [] if is_own else [f"calibration={used.name}: fitted to rows of {rows}"]


def stacks() -> list[str]:
    """The software stacks of which something is known: fitted to rows, or a habit."""
    fitted = (name.partition("/")[2] for name in _shipped("calibrations") if "/" in name)
    return sorted({*fitted, *filter(habits, stack_table())})
