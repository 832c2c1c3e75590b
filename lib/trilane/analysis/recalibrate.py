"""Recalibration: what measured runs teach the planner: constants and predictions before and after, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trilane.analysis.measure import Measurement
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel import calibration, shipped
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.fit import fit_time
from trilane.costmodel.predict import Prediction, predict, sizes_of
from trilane.costmodel.row_cells import cells_of
from trilane.costmodel.uncertainty import Posterior, posterior
from trilane.planning.search import search_space
from trilane.planning.space import space_around
from trilane.utils.numbers import amount
from trilane.utils.tables import Columns, DataFrame, Html, Table, Text, grouped
from trilane.workspace.study import Study

FAR = math.log(1.25)  # of ln(predicted / measured): memory beyond that is commented on
NOTHING = Text("Nothing to predict: the logs give no shape and topology, or `cluster` is not given.")


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
        """Measured against predicted seconds, a row a run."""
        import pandas as pd

        measured = [m.sec_per_it for m in self.runs]
        columns: dict[str, list[object]] = {"run": [m.name for m in self.runs], "measured s/it": [*measured]}
        for name, predictions in (("predicted", self.before), ("recalibrated", self.after)):
            columns[name] = [p.sec_per_it for p in predictions]
            columns[f"{name} / measured"] = [p.sec_per_it / s for p, s in zip(predictions, measured, strict=True)]
            columns[f"{name} ±"] = [f"{p.sec_hi / p.sec_per_it - 1:.0%}" for p in predictions]
        return pd.DataFrame(columns)

    def _repr_html_(self) -> str:
        found = super()._repr_html_() if self else Html.of("<p>{}</p>", NOTHING)
        return found + "".join(Html.of("<p>Not used: {}</p>", line) for line in self.left_out[:12])

    def memory(self) -> Table | Text:
        """Measured against predicted memory, a row for each run that printed it."""
        pairs = [(m, p) for m, p in zip(self.runs, self.before, strict=True) if m.memory_bytes > 0]
        columns: dict[str, list[object]] = {
            "run": [m.name for m, _ in pairs],
            "measured, fullest rank (GiB)": [m.memory_bytes / 2**30 for m, _ in pairs],
            "predicted (GiB)": [p.memory_bytes / 2**30 for _, p in pairs],
            "predicted / measured": [p.memory_bytes / m.memory_bytes for m, p in pairs],
        }
        return Columns(columns) if pairs else NOTHING

    def constants(self) -> Table | Text:
        """The planner's constants before and after."""
        names = [f.name for f in fields(Calibration) if f.name not in ("regimes", "stack", "own", "name")]
        pairs = (("before", self.prior), ("after", self.fitted))
        values = {when: [f"{getattr(c, name):.3g}" for name in names] for when, c in pairs}
        return Columns({"constant": names, **values}) if self else NOTHING

    @property
    def inside(self) -> int:
        """Runs whose seconds lay within the 90 % interval of the prediction before any of them."""
        return sum(p.sec_lo <= m.sec_per_it <= p.sec_hi for p, m in zip(self.before, self.runs, strict=True))

    def memory_summary(self) -> Text:
        """How far the predicted memory is off, where that is more than FAR."""
        ratios = [
            p.memory_bytes / m.memory_bytes for m, p in zip(self.runs, self.before, strict=True) if m.memory_bytes > 0
        ]
        far = [ratio for ratio in ratios if abs(math.log(ratio)) > FAR]
        if not far:
            return Text()
        worst = max(far, key=lambda ratio: abs(math.log(ratio)))
        return Text.of(
            "**The predicted memory is wrong by more than a quarter in {} of {} runs**, at worst {:.2g} times what was "
            "measured. Is the log that of the fullest rank (with a pipeline often the first or the last), and is what "
            "it prints the peak that was reserved? Recalibration corrects seconds, not memory.",
            *(len(far), len(ratios), worst),
        )

    def headline(self, timed: Sequence[Measurement]) -> dict[str, Any]:
        """The cards of the study's index: the model with most of the timed runs, its fastest run, and the prediction.

        Predicted / measured is given before any run, and after recalibration with these very runs.
        """
        cards = _of_model(timed)
        if self:
            measured = [m.sec_per_it for m in self.runs]
            for found, label in ((self.before, "before these runs"), (self.after, "after recalibration by them")):
                ratios = [p.sec_per_it / s for p, s in zip(found, measured, strict=True)]
                cards.append((f"{min(ratios):.3g} to {max(ratios):.3g}", f"predicted / measured seconds, {label}"))
            cards.append((f"{self.inside} of {len(measured)}", "runs inside the 90 % interval predicted before them"))
        return {"cards": [{"value": value, "label": label} for value, label in cards]}

    def measured_rows(self) -> DataFrame:
        """The measured runs in the columns that measured_rows.read_rows takes: `trilane plan backtest` fits to them."""
        import pandas as pd

        rows = zip(self.runs, self.cases, strict=True)
        return pd.DataFrame([cells_of(m.name, case, m.sec_per_it, m.memory_bytes) for m, case in rows])

    def save(self, study: Study, made_by: str) -> list[Path]:
        """Write calibration.json, predicted.csv and measured.csv into the study, where there is something to write."""
        if not self:
            return []
        return [
            study.save("calibration.json", calibration.to_json(self.fitted), made_by),
            study.save_table("predicted.csv", self.to_frame()),
            study.save_table("measured.csv", self.measured_rows()),
        ]


def _of_model(timed: Sequence[Measurement]) -> list[tuple[str, str]]:
    """Value and label of the cards on the model that most runs have (the first of several): its fastest run."""
    models = list(grouped(timed, lambda m: (m.config.shape, m.config.gbs)).values())
    runs = max(models, key=len, default=[])
    if not runs:
        return [("none", "timed runs")]
    fastest, size = min(runs, key=lambda m: m.sec_per_it), runs[0].config.parameters
    others = f" (one of {len(models)} models or batch sizes here)" if len(models) > 1 else ""
    cards = (
        [(f"{amount(size / 1e9)} B" if size >= 1e9 else f"{amount(size / 1e6)} M", f"parameters{others}")]
        if size
        else []
    )
    cards += [(f"{amount(fastest.sec_per_it)} s", f"an iteration of its fastest run, {fastest.name}")]
    if fastest.first_loss == fastest.first_loss:
        cards += [(f"{fastest.first_loss:.2f} → {fastest.last_loss:.2f}", "its loss (nats per token)")]
    return cards


def recalibrate(runs: Sequence[Measurement], cluster: Cluster | None = None) -> Recalibration:
    """The constants fitted to the runs whose shape and topology are known, on `cluster` unless they have a plan; not
    to those whose log leaves open how long an iteration takes.
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
    """The one of row_cells.STACKS that a log's dialect and arguments show, "" for none: it selects the prior."""
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
    pairs = zip(found, np.exp(belief.half_widths(cases)).tolist(), strict=True)
    return [replace(p, sec_lo=p.sec_per_it / factor, sec_hi=p.sec_per_it * factor) for p, factor in pairs]


def case_of(m: Measurement, cluster: Cluster | None = None) -> Configuration | None:
    """The run as the planner sees it, by its plan or its arguments, at the batch size that was measured; None where too
    little is known.

    Logs of 2021 are of attention that stored its scores, the only one there was; the dialect gives the year. What the
    arguments of other logs leave open gets the plain choice: equal layers a stage, no offload.
    """
    c, given = m.config, m.log.arguments
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
            attention="fused" if given.get("use_flash_attn") is True or m.log.dialect == "megatron-lm" else "scores",
        )
    except ValueError:
        return None
    engine = "megatron" if m.log.dialect == "megatron-lm" else ""
    case = Configuration(shape=c.shape, topology=topology, cluster=cluster, engine=engine)
    return None if invalid_reason(c.shape, topology) else case


def alternatives(case: Configuration, known: Calibration, keep: int = 8) -> list[Configuration]:
    """The best plans that train the model of `case` with its batch on as many GPUs."""
    t = case.topology
    space = space_around(t, [t.gpus], [t.gbs], sorted({1, 2, 4, t.mbs}), case.engine or ENGINES[0])
    found = search_space(case.shape, case.cluster, space, known, top=64)
    return [replace(case, topology=c.topology) for c in found.best_per_sizes(keep).rows]


def choices(study: Study, recalibration: Recalibration) -> list[Configuration]:
    """The plans to decide among: those of the study's plans.json, else alternatives to the first run.

    The measured plans of the same model and batch are always included. Empty where no run could be predicted.
    """
    if not recalibration:
        return []
    first = recalibration.cases[0]
    planned = study.plans() if (study.folder / "plans.json").exists() else []
    found = [replace(first, topology=p.topology, engine=p.engine) for p in planned if p.shape == first.shape]
    found = found or alternatives(first, recalibration.fitted)
    alike = [c for c in recalibration.cases if (c.shape, c.topology.gbs) == (first.shape, first.topology.gbs)]
    return list({(c.shape, c.topology): c for c in [*found, *alike]}.values())
