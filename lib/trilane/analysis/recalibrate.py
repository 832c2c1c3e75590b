"""What measured runs teach the planner, constants and predictions with intervals, and which short run is next."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.measure import Measurement
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, label_of
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel import calibration, shipped
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.fit import fit_time
from trilane.costmodel.memory import memory_bytes, oom_probability
from trilane.costmodel.predict import Prediction, predict, sizes_of
from trilane.costmodel.row_cells import cells_of
from trilane.costmodel.uncertainty import Z90, Posterior, posterior
from trilane.planning.search import search_space
from trilane.planning.space import space_around
from trilane.utils.numbers import amount
from trilane.utils.tables import Columns, DataFrame, Html, Table, Text, frame_of, grouped
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

    def memory_summary(self) -> Text:
        """How far the predicted memory is off, where that is more than a quarter."""
        ratios = [p.memory_bytes / m.memory_bytes for p, m in zip(self.before, self.runs, strict=True)]
        far = [ratio for ratio in ratios if ratio < 0.8 or ratio > 1.25]  # False for NaN
        text = (
            "**The predicted memory is wrong by more than a quarter in {} of {} runs**, at worst {:.2g} times what was "
            "measured. Is the log that of the fullest rank, and is what it prints the peak that was reserved? "
            "Recalibration corrects seconds, not memory."
        )
        worst = max(far, key=lambda ratio: abs(math.log(ratio)), default=1)
        return Text.of(text, len(far), len(ratios), worst) if far else Text()

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

    def headline(self, timed: Sequence[Measurement]) -> dict[str, Any]:
        """The cards of the study's index: of the model with most of the timed runs its size, fastest run and loss, then
        predicted / measured before any run, and after recalibration with these very runs.
        """
        models = list(grouped(timed, lambda m: (m.config.shape, m.config.gbs)).values())
        most = max(models, key=lambda runs: len(runs), default=[])
        best = min(most, key=lambda m: m.sec_per_it, default=None)
        cards = {} if best else {"timed runs": "none"}
        if best and best.config.parameters:
            others = f" (one of {len(models)} models or batch sizes here)" if len(models) > 1 else ""
            cards[f"parameters{others}"] = f"{amount(best.config.parameters / 1e6)} M"
        if best:
            cards[f"an iteration of its fastest run, {best.name}"] = f"{amount(best.sec_per_it)} s"
            if best.first_loss == best.first_loss:
                cards["its loss (nats per token)"] = f"{best.first_loss:.2f} → {best.last_loss:.2f}"
        when = {"before these runs": self.before, "after recalibration by them": self.after} if self else {}
        for label, found in when.items():
            ratios = [p.sec_per_it / m.sec_per_it for p, m in zip(found, self.runs, strict=True)]
            cards[f"predicted / measured seconds, {label}"] = f"{min(ratios):.3g} to {max(ratios):.3g}"
        inside = f"{self.inside} of {len(self.runs)}"
        cards |= {"runs inside the 90 % interval predicted before them": inside} if self else {}
        return {"cards": [{"value": value, "label": label} for label, value in cards.items()]}

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

        recalibrate(measure_runs(Study.open("demo")).timed).constants()
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


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """A possible run, its cost, the interval of the fastest plan's time after it (90 %, of ln(seconds)), its worth."""

    case: Configuration
    gpu_hours: float
    half_width_after: float
    worth: float


@dataclass(frozen=True, kw_only=True)
class NextRuns(Table):
    """Short runs that would tell most about the choice among `plans`, best first; false where there is no plan.

    `winner` is believed to be the fastest, in `seconds` with their `half_width` (90 %, of ln(seconds)); `rival`, the
    next one, may be as fast; "" where that is unlikely.
    """

    plans: tuple[Configuration, ...] = ()
    winner: str = ""
    rival: str = ""
    seconds: float = math.nan
    half_width: float = math.nan
    runs: tuple[ShortRun, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.plans)

    def summary(self) -> Text:
        """Which plan is believed to be the fastest, and whether that is open."""
        text = "Of {} plans {:code} is believed to be the fastest, {:.3g} s an iteration ± {:.1%}{}."
        rival = Text.of("; {:code} may be as fast", self.rival) if self.rival else ""
        width = np.expm1(self.half_width)
        return Text.of(text, len(self.plans), self.winner, self.seconds, width, rival) if self else NOTHING

    def to_frame(self) -> DataFrame:
        """The eight best runs: cost, and the interval of the fastest plan's time now and after."""
        columns: dict[str, str | Callable[[Any], Any]] = {
            f"short run ({ITERATIONS} iterations)": lambda run: label(run.case),
            "gbs": "case.topology.gbs",
            "GPU-hours": "gpu_hours",
            "winner's time, now": lambda run: f"± {np.expm1(self.half_width):.1%}",
            "after it": lambda run: f"± {np.expm1(run.half_width_after):.1%}",
        }
        return frame_of(self.runs[:8], columns)

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self else Html.of("<p>{}</p>", NOTHING)


def next_runs(study: Study, recalibration: Recalibration) -> NextRuns:
    """The choice among the study's plans after recalibration, and the short runs that would improve it most.

        next_runs(study, recalibrate(runs.timed)).summary()

    The plans are those of plans.json, else the best that train the first run's model with its batch on as many GPUs,
    and the measured ones of that model and batch.
    """
    if not recalibration:
        return NextRuns()
    first, t = recalibration.cases[0], recalibration.cases[0].topology
    planned = study.plans() if (study.folder / "plans.json").exists() else []
    found = [replace(first, topology=p.topology, engine=p.engine) for p in planned if p.shape == first.shape]
    if not found:
        space = space_around(t, [t.gpus], [t.gbs], sorted({1, 2, 4, t.mbs}), first.engine or ENGINES[0])
        best = search_space(first.shape, first.cluster, space, recalibration.fitted, top=64).best_per_sizes(8).rows
        found = [replace(first, topology=candidate.topology) for candidate in best]
    found += [c for c in recalibration.cases if (c.shape, c.topology.gbs) == (first.shape, t.gbs)]
    return short_runs(list({(c.shape, c.topology): c for c in found}.values()), recalibration.belief)


def short_runs(plans: Sequence[Configuration], belief: Posterior, runs: Sequence[Configuration] = ()) -> NextRuns:
    """The runs (those given, else the plans and smaller versions of them), the most worthwhile first.

    A run of plan x takes cov(d, x)^2 / var(x's measured ln(seconds)) from the variance of d. That is the distance of
    the second fastest plan from the fastest, or, where it is unlikely to be as fast, the fastest plan's time. What is
    taken for each GPU-hour is the worth. Left out: third plans, and that several runs together may tell more.
    """
    runs = list(runs) or siblings(plans)
    # of a sequence, which compares plans of different batch sizes
    mean = belief.expected(plans) - np.log([p.topology.gbs for p in plans])
    covariance = belief.covariance([*plans, *runs])
    first, second = [*np.argsort(mean), int(np.argmin(mean))][:2]
    spread = covariance[first, first] + covariance[second, second] - 2 * covariance[first, second]
    is_open = first != second and mean[second] - mean[first] < Z90 * np.sqrt(spread)
    moves = covariance[:, len(plans) :] / np.sqrt(np.diag(covariance)[len(plans) :] + belief.noise**2)
    taken = (moves[first] - moves[second] if is_open else moves[first]) ** 2
    left = Z90 * np.sqrt(np.maximum(covariance[first, first] - moves[first] ** 2, 0.0))
    found = []
    for run, seconds, width, gain in zip(runs, np.exp(belief.expected(runs)), left, taken, strict=True):
        # imports, NCCL, first kernels: guessed, not measured
        whole = (120.0 if run.cluster.gpu.kind == "cuda" else 15.0) + ITERATIONS * float(seconds)
        hours = run.topology.gpus * whole / 3600
        found.append(ShortRun(case=run, gpu_hours=hours, half_width_after=float(width), worth=float(gain) / hours))
    return NextRuns(
        plans=tuple(plans),
        winner=label(plans[first]),
        rival=label(plans[second]) if is_open else "",
        seconds=float(np.exp(belief.expected([plans[first]])[0])),
        half_width=Z90 * float(np.sqrt(covariance[first, first])),
        runs=tuple(sorted(found, key=lambda run: -run.worth)),
    )


def siblings(plans: Sequence[Configuration]) -> list[Configuration]:
    """The plans, and each with a half, a quarter, ... of its replicas and batch: the same pipeline on fewer GPUs.

    Those that more likely than not run out of memory are left out: nothing would be measured.
    """
    found = dict[object, Configuration]()
    for plan in plans:
        t = plan.topology
        for parts in (2**n for n in range(t.dp.bit_length()) if t.dp % 2**n == 0):
            case = replace(plan, topology=replace(t, dp=t.dp // parts, gbs=t.gbs // parts))
            need = memory_bytes(columns_of(case.shape, case.topology, case.engine), case.cluster)
            if float(oom_probability(need, case.cluster)) <= 0.5:
                found.setdefault((plan.shape, case.topology), case)
    return list(found.values()) or list(plans)


def label(case: Configuration) -> str:
    """The label of a plan, with every choice beyond the defaults of its cluster and engine."""
    return label_of(case.shape, case.cluster, case.topology, case.engine or ENGINES[0])
