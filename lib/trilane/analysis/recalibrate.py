"""Learning: what measured runs teach the planner: predictions before and after, each with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trilane.analysis.measure import Measurement
from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.calibration import Calibration, Configuration, default
from trilane.costmodel.fit import fit_time
from trilane.costmodel.measured_rows import cells_of
from trilane.costmodel.predict import Prediction, predict
from trilane.costmodel.uncertainty import Posterior, posterior
from trilane.planning.search import search_space
from trilane.planning.space import space_around
from trilane.workspace.study import Study

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Recalibration:
    """The runs that could be predicted, as cases, and what is believed before and after having seen them."""

    runs: tuple[Measurement, ...]
    cases: tuple[Configuration, ...]
    prior: Calibration
    fitted: Calibration
    belief: Posterior
    before: tuple[Prediction, ...]
    after: tuple[Prediction, ...]

    def columns(self) -> dict[str, list[Any]]:
        """Measured against predicted, a row a run."""
        measured = [m.sec_per_it for m in self.runs]
        columns: dict[str, list[Any]] = {"run": [m.name for m in self.runs], "measured s/it": measured}
        for name, predictions in (("predicted", self.before), ("recalibrated", self.after)):
            columns[name] = [p.sec_per_it for p in predictions]
            columns[f"{name} / measured"] = [p.sec_per_it / s for p, s in zip(predictions, measured, strict=True)]
            columns[f"{name} ±"] = [f"{p.sec_hi / p.sec_per_it - 1:.0%}" for p in predictions]
        return columns


def recalibrate(runs: Sequence[Measurement], cluster: Cluster | None = None) -> Recalibration | None:
    """The lesson of the runs whose shape and topology are known, on `cluster` unless they have a plan; else None."""
    pairs = [(m, case) for m in runs if m.sec_per_it > 0 and (case := case_of(m, cluster))]
    if not pairs:
        return None
    cases, seconds = [case for _, case in pairs], [m.sec_per_it for m, _ in pairs]
    prior = default(cases[0].cluster, stack(pairs[0][0]))
    fitted = fit_time(cases, seconds, prior)
    # what is written down for later plans: the width for one like those that ran
    width = float(np.median(posterior(cases, seconds, fitted).half_widths(cases)))
    fitted = replace(fitted, half_width=width)
    belief = posterior(cases, seconds, fitted)
    return Recalibration(
        runs=tuple(m for m, _ in pairs),
        cases=tuple(cases),
        prior=prior,
        fitted=fitted,
        belief=belief,
        before=tuple(predictions(cases, prior)),
        after=tuple(predictions(cases, fitted, belief)),
    )


def stack(m: Measurement) -> str:
    """Which of rows.STACKS a log's dialect and arguments show, "" for none: it chooses among shipped calibrations."""
    if m.plan or m.log.dialect not in ("megatron-2021", "megatron-lm", "megatron-deepspeed-2022"):
        return ""
    if m.log.arguments.get("deepspeed.zero_optimization_stage") == 3:
        return "deepspeed-zero"
    return "megatron-deepspeed" if m.log.dialect == "megatron-deepspeed-2022" else "megatron-lm"


def predictions(
    cases: Sequence[Configuration], calibration: Calibration, belief: Posterior | None = None
) -> list[Prediction]:
    """What is predicted for each case, with the belief's intervals where it is given."""
    found = [predict(c.shape, c.topology, c.cluster, calibration) for c in cases]
    if belief is None:
        return found
    factors = [math.exp(width) for width in belief.half_widths(cases)]
    return [
        replace(p, sec_lo=p.sec_per_it / factor, sec_hi=p.sec_per_it * factor)
        for p, factor in zip(found, factors, strict=True)
    ]


def case_of(m: Measurement, cluster: Cluster | None = None) -> Configuration | None:
    """The run as the planner sees it, by its plan or its arguments, at the batch size that was measured; None where too
    little is known.

    Logs of 2021 are of attention that stored its scores, the only one there was; the dialect gives the year. What the
    arguments of other logs leave open gets the plain choice: equal layers a stage, no offload.
    """
    c, given = m.config, m.log.arguments
    if m.plan:
        topology = replace(m.plan.topology, gbs=int(c.gbs))
        return Configuration(shape=m.plan.shape, topology=topology, cluster=m.plan.cluster)
    if not (cluster and c.shape and c.gpus and c.mbs and c.gbs):
        return None
    zero = given.get("zero_stage", given.get("deepspeed.zero_optimization_stage", 0))
    try:
        topology = Topology(
            tp=c.tp,
            pp=c.pp,
            dp=c.dp,
            mbs=c.mbs,
            gbs=int(c.gbs),
            zero=zero if isinstance(zero, int) else 0,
            recompute=c.recompute,
            interleaving=c.interleaving,
            sequence_parallel=given.get("sequence_parallel") is True and c.tp > 1,
            precision=c.precision or ("fp16" if cluster.gpu.kind == "cuda" else "fp32"),
            attention="fused" if given.get("use_flash_attn") is True or m.log.dialect == "megatron-lm" else "scores",
        )
    except ValueError:
        return None
    case = Configuration(shape=c.shape, topology=topology, cluster=cluster)
    return None if invalid_reason(c.shape, topology) else case


def rivals(case: Configuration, calibration: Calibration, keep: int = 8) -> list[Configuration]:
    """The best plans beside `case` that train the same model with the same batch on as many GPUs."""
    t = case.topology
    space = space_around(t, [t.gpus], [t.gbs], sorted({1, 2, 4, t.mbs}))
    found = search_space(case.shape, case.cluster, space, calibration, top=64)
    return [replace(case, topology=c.topology) for c in found.best_lanes(keep)]


def choices(study: Study, lesson: Recalibration) -> list[Configuration]:
    """The plans to decide among: those of the study's plans.json, else the rivals of the lesson's first run.

    The measured plans of the same model and batch are always among them.
    """
    first = lesson.cases[0]
    found = _planned(study, first) or rivals(first, lesson.fitted)
    alike = [c for c in lesson.cases if (c.shape, c.topology.gbs) == (first.shape, first.topology.gbs)]
    return list({(c.shape, c.topology): c for c in [*found, *alike]}.values())


def table(lesson: Recalibration) -> "pd.DataFrame":
    """The measured runs in the columns that rows.read_rows takes: what `trilane backtest` can be calibrated on."""
    import pandas as pd

    rows = zip(lesson.runs, lesson.cases, strict=True)
    return pd.DataFrame([cells_of(m.name, case, m.sec_per_it, m.memory_bytes) for m, case in rows])


def _planned(study: Study, like: Configuration) -> list[Configuration]:
    if not (study.folder / "plans.json").exists():
        return []
    plans = study.load("plans.json", "02_topology")
    if ModelShape(**plans["shape"]) != like.shape:
        return []
    return [replace(like, topology=Topology(**plan["topology"])) for plan in plans["plans"]]
