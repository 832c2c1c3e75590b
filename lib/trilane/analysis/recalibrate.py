"""What measured runs teach the planner, constants and predictions with intervals, and which short run is next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from trilane.analysis.measure import Measurement
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, label_of
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel import calibration, shipped
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.fit import fit_time
from trilane.costmodel.measured_rows import cells_of
from trilane.costmodel.predict import Prediction, predict, sizes_of
from trilane.costmodel.uncertainty import Z90, Posterior, posterior
from trilane.planning.search import search_space
from trilane.planning.space import space_around
from trilane.utils.tables import Columns, DataFrame, Html, Table, Text
from trilane.workspace.study import Study

NOTHING = Text("Nothing to predict: the logs give no shape and topology, or `cluster` is not given.")
ITERATIONS = 20  # of a short run


@dataclass(frozen=True, kw_only=True)
class Recalibration(Table):
    """The runs that could be predicted, as cases, and what is predicted before and after; false where there is none.

    `left_out` names the runs of which a log's numbers contradict each other, and how: nothing is learned from them.
    """

    runs: tuple[Measurement, ...]
    cases: tuple[Configuration, ...]
    prior: Calibration
    fitted: Calibration
    belief: Posterior
    before: tuple[Prediction, ...]
    after: tuple[Prediction, ...]
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cases)

    def to_frame(self) -> DataFrame:
        """Measured against predicted seconds, and memory of the fullest rank where it was printed; a row a run."""
        table = pd.DataFrame({"run": [m.name for m in self.runs], "measured s/it": [m.sec_per_it for m in self.runs]})
        for name, predictions in (("predicted", self.before), ("recalibrated", self.after)):
            table[name] = [p.sec_per_it for p in predictions]
            table[f"{name} / measured"] = table[name] / table["measured s/it"]
            table[f"{name} ±"] = [f"{p.sec_hi / p.sec_per_it - 1:.0%}" for p in predictions]
        if any(m.memory_bytes > 0 for m in self.runs):
            table["measured (GiB)"] = [m.memory_bytes / 2**30 for m in self.runs]
            table["predicted (GiB)"] = [p.memory_bytes / 2**30 for p in self.before]
            table["predicted / measured (GiB)"] = table["predicted (GiB)"] / table["measured (GiB)"]
        return table

    def _repr_html_(self) -> str:
        found = super()._repr_html_() if self else Html.of("<p>{}</p>", NOTHING)
        return found + "".join(Html.of("<p>Not used: {}</p>", line) for line in self.left_out[:12])

    @property
    def inside(self) -> int:
        """Runs whose seconds lay within the 90 % interval of the prediction before any of them."""
        return sum(p.sec_lo <= m.sec_per_it <= p.sec_hi for p, m in zip(self.before, self.runs, strict=True))

    def measured_rows(self) -> DataFrame:
        """The measured runs in the columns that measured_rows.read_rows takes: `trilane plan backtest` fits to them."""
        rows = zip(self.runs, self.cases, strict=True)
        return pd.DataFrame([cells_of(m.name, case, m.sec_per_it, m.memory_bytes) for m, case in rows])

    def save(self, study: Study, made_by: str) -> list[Path]:
        """Write calibration.json, predicted.csv and measured.csv into the study, where there is something to write."""
        if not self:
            return []
        tables = {"predicted.csv": self.to_frame(), "measured.csv": self.measured_rows()}
        first = study.save("calibration.json", calibration.to_json(self.fitted), made_by)
        return [first, *(study.save_table(name, table) for name, table in tables.items())]


def recalibrate(runs: Sequence[Measurement], cluster: Cluster | None = None) -> Recalibration:
    """The constants fitted to the runs whose shape and topology are known, on `cluster` unless they have a plan; not
    to those whose log leaves open how long an iteration takes.

        recalibrate(measure_runs(Study.open("demo")).timed).to_frame()
    """
    pairs = [(m, case) for m in runs if m.sec_per_it > 0 and (case := case_of(m, cluster))]
    left_out = tuple(f"{m.name}: {m.time_problems[0]}" for m, _ in pairs if m.time_problems)
    pairs = [(m, case) for m, case in pairs if not m.time_problems]
    cases, seconds = [case for _, case in pairs], [m.sec_per_it for m, _ in pairs]
    prior = shipped.default(cases[0].cluster, stack(pairs[0][0])) if pairs else Calibration()
    fitted = fit_time(cases, seconds, prior) if pairs else prior
    if pairs:  # what is written down for later plans: the width for one like those that ran
        width = float(np.median(posterior(cases, seconds, fitted).half_widths(cases)))
        fitted = replace(fitted, half_width=width, stack="", own=sizes_of(cases))
    belief = posterior(cases, seconds, fitted)
    return Recalibration(
        runs=tuple(m for m, _ in pairs),
        cases=tuple(cases),
        prior=prior,
        fitted=fitted,
        belief=belief,
        before=tuple(predictions(cases, prior)),
        after=tuple(predictions(cases, fitted, belief)),
        left_out=left_out,
    )


def stack(m: Measurement) -> str:
    """The software stack that a log's dialect and arguments show, "" for none: it selects the prior."""
    if m.plan or m.log.dialect not in ("megatron-2021", "megatron-lm", "megatron-deepspeed-2022"):
        return ""
    if m.log.arguments.get("deepspeed.zero_optimization_stage") == 3:
        return "deepspeed-zero"
    return "megatron-deepspeed" if m.log.dialect == "megatron-deepspeed-2022" else "megatron-lm"


def predictions(
    cases: Sequence[Configuration], known: Calibration, belief: Posterior | None = None
) -> list[Prediction]:
    """The prediction for each case, with the belief's intervals where it is given."""
    found = [predict(c, known) for c in cases]
    if belief is None:
        return found
    widened = zip(found, np.exp(belief.half_widths(cases)).tolist(), strict=True)
    return [replace(p, sec_lo=p.sec_per_it / f, sec_hi=p.sec_per_it * f) for p, f in widened]


def case_of(m: Measurement, cluster: Cluster | None = None) -> Configuration | None:
    """The run as the planner sees it, by its plan or its arguments, at the batch size that was measured; None where too
    little is known.

    Logs of 2021 are of attention that stored its scores, the only one there was; the dialect gives the year. What the
    arguments of other logs leave open gets the plain choice: equal layers a stage, no offload.
    """
    c, given, is_lm = m.config, m.log.arguments, m.log.dialect == "megatron-lm"
    if m.plan:
        topology = replace(m.plan.topology, gbs=int(c.gbs))
        return Configuration(shape=m.plan.shape, topology=topology, cluster=m.plan.cluster, engine=m.plan.engine)
    if not (cluster and c.shape and c.gpus and c.mbs and c.gbs):
        return None
    zero = given.get("zero_stage", given.get("deepspeed.zero_optimization_stage", 0))
    try:
        topology = Topology(
            **{name: getattr(c, name) for name in ("tp", "pp", "dp", "mbs", "recompute", "interleaving")},
            gbs=int(c.gbs),
            zero=zero if isinstance(zero, int) else 0,
            sequence_parallel=given.get("sequence_parallel") is True and c.tp > 1,
            precision=c.precision or ("fp16" if cluster.gpu.kind == "cuda" else "fp32"),
            attention="fused" if given.get("use_flash_attn") is True or is_lm else "scores",
        )
    except ValueError:
        return None
    case = Configuration(shape=c.shape, topology=topology, cluster=cluster, engine="megatron" if is_lm else "")
    return None if invalid_reason(c.shape, topology) else case


def next_runs(study: Study, recalibration: Recalibration) -> Columns | Text:
    """The study's plans after recalibration, in the order in which to measure them.

        next_runs(study, recalibrate(runs.timed))

    The plans are those of plans.json, else the best that train the first run's model with its batch on as many GPUs,
    and the measured ones of that model and batch.
    """
    if not recalibration:
        return NOTHING
    first, t = recalibration.cases[0], recalibration.cases[0].topology
    planned = study.plans() if (study.folder / "plans.json").exists() else []
    found = [replace(first, topology=p.topology, engine=p.engine) for p in planned if p.shape == first.shape]
    if not found:
        space = space_around(t, [t.gpus], [t.gbs], sorted({1, 2, 4, t.mbs}), first.engine or ENGINES[0])
        best = search_space(first.shape, first.cluster, space, recalibration.fitted, top=64).best_per_sizes(8).rows
        found = [replace(first, topology=candidate.topology) for candidate in best]
    found += [c for c in recalibration.cases if (c.shape, c.topology.gbs) == (first.shape, t.gbs)]
    table = short_runs(list({(c.shape, c.topology): c for c in found}.values()), recalibration.belief).head(8)
    return Columns(table.assign(**{"±": table["±"].map("{:.1%}".format)}))


def short_runs(plans: Sequence[Configuration], belief: Posterior) -> DataFrame:
    """The plans as short runs of ITERATIONS, the one first that may be the fastest.

    Of each the believed seconds, half of their 90 % interval, and the GPU-hours of the run. The lower end of each
    interval decides (optimism in the face of uncertainty: Auer et al. 2002, Machine Learning 47): a plan is worth a run
    while it may still be the fastest. Left out: what one run teaches about another plan.
    """
    seconds, width = np.exp(belief.expected(plans)), np.exp(Z90 * np.sqrt(np.diag(belief.covariance(plans))))
    # imports, NCCL, first kernels: guessed, not measured
    start = [120.0 if c.cluster.gpu.kind == "cuda" else 15.0 for c in plans]
    gpus, gbs = (np.array([getattr(c.topology, name) for c in plans]) for name in ("gpus", "gbs"))
    labels = [label_of(c.shape, c.cluster, c.topology, c.engine or ENGINES[0]) for c in plans]
    columns = {"short run": labels, "gbs": gbs, "s/it": seconds, "±": width - 1}
    table = pd.DataFrame({**columns, "GPU-hours": gpus * (start + ITERATIONS * seconds) / 3600})
    return table.iloc[np.argsort(seconds / gbs / width)].reset_index(drop=True)
