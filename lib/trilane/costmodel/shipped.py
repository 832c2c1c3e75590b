"""The constants that ship: what is assumed of a cluster and a software stack before any row of
one's own.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration, Configuration, Regime, from_json
from trilane.costmodel.constants import BOUNDS, card_facts
from trilane.costmodel.fit import MISFIT, log_constants, row_errors, sensitivities
from trilane.costmodel.measured_rows import MeasuredRow, every_row, stacks, usable
from trilane.utils.frozen import frozen
from trilane.utils.tables import grouped
from trilane.utils.validation import from_mapping, read_json, require, shipped_json
from trilane.workspace.study import Study, load_cluster


def default(cluster: Cluster, stack: str = "") -> Calibration:
    """What is assumed before the first measured row of one's own.

    The shipped fit of that cluster and software stack, or of the cluster if no stack is given; else
    (and for a card with shares of its own) what the fits of the card, the cluster and the stack
    have in common with it (see combined).
    """
    name = nodes_name(cluster.name)
    if stack:
        name = f"{name}/{stack}"
    if name in shipped_json("calibrations") and not cluster.gpu.shares:
        return _shipped(name)
    if cluster.gpu.kind == "cpu":
        # 0.7 ms a layer, where one torch operation takes 1.8 microseconds (Megatron-Core 0.16, one
        # core, a tiny layer), and no fused kernels. What is sent takes the cores from what it could
        # hide under. The interval held 15 of 20 runs of five demos on two shared cores.
        launch = 400 * cluster.launch_overhead_s
        bound = BOUNDS["launch_s"]
        return Calibration(
            matmul=0.98,
            launch_s=min(max(launch, bound.low), bound.high),
            passes=1.5,
            exposed=1.0,
            overlap=0.0,
            half_width=0.235,
            # other work may take half of the machine
            deviations=tuple(max(bound.deviation, 0.5) for bound in BOUNDS.values()),
        )
    return combined(cluster, stack, _fits())


@functools.cache
def _shipped(name: str) -> Calibration:
    return from_json(shipped_json("calibrations")[name])


@functools.cache
def _fits() -> list["Fit"]:
    """The shipped fits with their rows."""
    groups = grouped(usable(every_row()), lambda r: f"{nodes_name(r.case.cluster.name)}/{r.stack}")
    return [Fit.of(rows, _shipped(name)) for name, rows in groups.items()]


@frozen
class Fit:
    """What the rows of one cluster and software stack say, linearized at a calibration fitted to
    them.

    slopes      derivatives of ln(seconds) by the logarithms of the constants, (R, C)
    slowness    by how much slower than the prior of the stack the rows were, ln(seconds), (R,)
    trust       how much each row counts, (R,): 1, or less where it is far out
    """

    cluster: Cluster
    stack: str
    slopes: np.ndarray
    slowness: np.ndarray
    trust: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[MeasuredRow], calibration: Calibration) -> "Fit":
        cluster = rows[0].case.cluster
        stack = rows[0].stack
        cases = [row.case for row in rows]
        errors = row_errors(cases, [row.seconds for row in rows], calibration)
        slopes = sensitivities(cases, calibration)
        free = log_constants(calibration.without_launch_blocking())
        moved = free - log_constants(prior_of(cluster, stack))
        return cls(
            cluster=cluster,
            stack=stack,
            slopes=slopes,
            slowness=slopes @ moved - errors,
            trust=1 / np.sqrt(1 + (errors / MISFIT) ** 2),
        )

    def shares(self, cluster: Cluster, stack: str) -> np.ndarray:
        """Whether it has the generation of cards, the cluster and the stack (its years are one),
        (3,).
        """
        own = _traits(self.cluster, self.stack)
        pairs = zip(own, _traits(cluster, stack), strict=True)
        return np.array([mine == other != "" for mine, other in pairs])


def _traits(cluster: Cluster, stack: str) -> tuple[tuple[int, ...], str, str]:
    return cluster.gpu.compute_capability, nodes_name(cluster.name), re.sub(r"-20\d\d$", "", stack)


def combined(cluster: Cluster, stack: str, fits: Sequence[Fit]) -> Calibration:
    """The constants of a cluster and stack without rows, and their deviations: the posterior given
    other fits' rows.

    The logarithm of each constant is normal around its prior (constants.py, and what stacks.json
    knows of the stack); two fits share a part of its variance (Bound.shared) for their card, their
    cluster and their stack. The model is linear around each fit, so this is a Gaussian process over
    the rows (Rasmussen and Williams 2006, equation 2.25). `rows` is 0: nothing was fitted here.
    """
    base = prior_of(cluster, stack)
    bounds = BOUNDS.values()
    variance = np.square(base.deviations)  # (C,)
    shared = np.array([bound.shared for bound in bounds]).T  # (3, C)
    slopes = np.vstack([f.slopes for f in fits])  # (R, C)
    slowness = np.concatenate([f.slowness for f in fits])  # (R,)
    trust = np.concatenate([f.trust for f in fits])
    of = np.repeat(np.arange(len(fits)), [len(f.trust) for f in fits])  # the fit of each row
    among = np.array([[f.shares(g.cluster, g.stack) @ shared for g in fits] for f in fits])
    among[np.arange(len(fits)), np.arange(len(fits))] = 1  # (F, F, C)
    to_plan = np.array([f.shares(cluster, stack) @ shared for f in fits])
    across = to_plan[of] * variance * slopes  # (R, C)
    covariance = np.einsum("ic,jc,ijc->ij", slopes * variance, slopes, among[of][:, of])
    covariance += np.diag(MISFIT**2 / trust)
    weights = np.linalg.solve(covariance, across)
    logs = log_constants(base) + slowness @ weights
    deviations = np.sqrt(np.maximum(variance - (across * weights).sum(0), 0.02 * variance))
    low = [bound.low for bound in bounds]
    high = [bound.high for bound in bounds]
    values = np.clip(np.exp(logs), low, high).tolist()
    constants = dict(zip(BOUNDS, values, strict=True))
    return replace(base, **constants, deviations=tuple(deviations.tolist()), stack="")


def nodes_name(cluster: str) -> str:
    """The name under which a cluster's rows are fitted: V100 cards of 16 and 32 GB stand in nodes
    of one kind.
    """
    return cluster.replace("jz-v100-16g", "jz-v100-32g")


def prior_of(cluster: Cluster, stack: str) -> Calibration:
    """The priors of constants.py and of the card, for rows of that cluster and stack: its days'
    regimes, their factors at the prior, and what the stack is known to do.
    """
    deviations = dict(zip(BOUNDS, Calibration().deviations, strict=True))
    values = dict[str, Any]()
    facts = card_facts(cluster.gpu)
    for name in facts.keys() & BOUNDS.keys():
        values[name], deviations[name] = facts[name]
    values |= stacks().get(stack, {}).get("constants", {})
    given = shipped_json("regimes").get(nodes_name(cluster.name), [])
    regimes = tuple(from_mapping(Regime, regime, "regime") for regime in given)
    values |= {"regimes": regimes, "stack": stack}
    return Calibration(**values, deviations=tuple(deviations.values()))


def calibration_for(cluster: Cluster | str, source: str | Calibration = "") -> Calibration:
    """The constants to predict by: those that ship for the cluster (""), or for a software stack on
    it (of stacks()), those in a JSON file, those that 04_analyze fitted in a study, or `source`
    itself. ValueError for those of another card.

        calibration_for(load_cluster("jz-a100-80g"), "megatron-core")
    """
    cluster = load_cluster(cluster)
    if isinstance(source, Calibration):
        known = source
    else:
        known = replace(_constants(cluster, source), name=source or cluster.name)
    family = known.card.partition("-")[0]
    rule = f"is of {known.card}, but {cluster.name} has {cluster.gpu.name}"
    is_its_card = family in ("", cluster.gpu.name.partition("-")[0])
    require(is_its_card, "calibration", known.name, rule)
    return known


def _constants(cluster: Cluster, source: str) -> Calibration:
    if not source or source in stacks():
        return default(cluster, source)
    if source.endswith(".json") or Path(source).is_file():
        return from_json(read_json(source, "calibration"), source)
    study = Study(source)
    rule = f"is neither a study, nor a JSON file, nor one of the stacks {', '.join(stacks())}"
    require(study.folder.is_dir(), "calibration", source, rule)
    return from_json(study.values("calibration.json", "04_analyze"), source)


def constants_of(
    plan: Plan | Configuration, source: str | Calibration = "", cluster: Cluster | None = None
) -> Calibration:
    """The constants for a plan: those of `source`, where given, as calibration_for() takes it; else
    those that the plan carries, which predicted it; else the cluster's. On nodes of another
    `cluster` those of that.

        constants_of(read_plan("plan.json")).hash
    """
    kept = plan.calibration if isinstance(plan, Plan) else None
    machine = cluster or plan.cluster
    is_same = machine.name == plan.cluster.name and machine.gpu == plan.cluster.gpu
    if not source and kept and is_same:
        source = replace(from_json(kept["constants"], kept["name"]), name=kept["name"])
    return calibration_for(machine, source)
