"""The next short run: which measurement is worth most to the choice of a plan, per GPU-hour that it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trilane.analysis.recalibrate import NOTHING, Recalibration, choices
from trilane.config.engines import ENGINES, label_of
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Configuration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.memory import memory_bytes, oom_probability
from trilane.costmodel.uncertainty import Posterior
from trilane.utils.tables import DataFrame, Html, Table, Text
from trilane.utils.validation import require
from trilane.workspace.study import Study

ITERATIONS = 20  # of a short run
STARTUP_S = {"cuda": 120.0, "cpu": 15.0}  # its start: imports, NCCL, first kernels; guessed, not measured
DRAWS = 401  # values of a standard normal that stand for all of them
CERTAIN = 1e-4  # of ln(seconds): below this regret the choice is clear, and the winner's time is the question
SHOWN = 8  # runs in the table


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The belief about the plans: which is fastest, the chance of each, and the expected cost of choosing now.

    `regret` is the share of an iteration's time that choosing `winner` is expected to lose against the plan that would
    prove fastest; `seconds` and `half_width` are the winner's (90 % interval, of ln(seconds)).
    """

    winner: int
    chances: tuple[float, ...]
    regret: float
    seconds: float
    half_width: float


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """A possible run: its cost, and what is expected to be known after it.

    regret_saved       the part of Decision.regret that this run is expected to save, as a share of the training's time
    half_width_after   of the winner's predicted time
    worth              regret saved (or, once the choice is certain, variance of the winner's time removed) per GPU-hour
    """

    case: Configuration
    gpu_hours: float
    regret_saved: float
    half_width_after: float
    worth: float

    @property
    def label(self) -> str:
        return label(self.case)


@dataclass(frozen=True, kw_only=True)
class NextRuns(Table):
    """The plans to choose among, the present choice, and possible runs, best first; false where there is none."""

    plans: tuple[Configuration, ...] = ()
    decision: Decision | None = None
    runs: tuple[ShortRun, ...] = ()

    def __bool__(self) -> bool:
        return self.decision is not None

    def summary(self) -> Text:
        """Which plan is believed to be the fastest, and what choosing it now costs."""
        if not (d := self.decision):
            return NOTHING
        return Text.of(
            "Of {} plans {:code} is believed to be the fastest (chance {:.0%}), {:.3g} s an iteration ± {:.1%}. "
            "Choosing it now costs {:.2%} of the time, on average.",
            *(len(self.plans), label(self.plans[d.winner]), d.chances[d.winner]),
            *(d.seconds, np.expm1(d.half_width), d.regret),
        )

    def to_frame(self) -> DataFrame:
        """The SHOWN best runs: cost, expected saving, and the interval of the winner's time now and after."""
        import pandas as pd

        best, now = self.runs[:SHOWN], f"± {np.expm1(self.decision.half_width):.1%}" if self.decision else ""
        return pd.DataFrame(
            {
                f"short run ({ITERATIONS} iterations)": [run.label for run in best],
                "gbs": [run.case.topology.gbs for run in best],
                "GPU-hours": [run.gpu_hours for run in best],
                "expected saving of time": [f"{run.regret_saved:.3%}" for run in best],
                "winner's time, now": [now] * len(best),
                "after it": [f"± {np.expm1(run.half_width_after):.1%}" for run in best],
            }
        )

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self else Html.of("<p>{}</p>", NOTHING)


def label(case: Configuration) -> str:
    """The label of a plan, with every choice beyond the defaults of its cluster and engine."""
    return label_of(case.shape, case.cluster, case.topology, case.engine or ENGINES[0])


def next_runs(study: Study, recalibration: Recalibration) -> NextRuns:
    """The choice among the study's plans after recalibration, and the short runs that would improve it most."""
    if not (plans := choices(study, recalibration)):
        return NextRuns()
    decision, runs = decide(plans, recalibration.belief), short_runs(plans, recalibration.belief)
    return NextRuns(plans=tuple(plans), decision=decision, runs=tuple(runs))


def decide(plans: Sequence[Configuration], belief: Posterior) -> Decision:
    """The present decision among the plans; ValueError where there is no plan."""
    require(bool(plans), "plans", "none", "nothing to decide")
    mean, covariance = _per_sequence(plans, belief), belief.covariance(plans)
    draws = np.random.default_rng(0).multivariate_normal(mean, covariance, size=4000, method="eigh")
    winner = int(np.argmin(mean))
    fastest = np.bincount(draws.argmin(axis=1), minlength=len(plans)) / len(draws)
    return Decision(
        winner=winner,
        chances=tuple(fastest.tolist()),
        regret=float(np.mean(draws[:, winner] - draws.min(axis=1))),
        seconds=float(np.exp(belief.expected([plans[winner]])[0])),
        half_width=1.645 * float(np.sqrt(covariance[winner, winner])),
    )


def short_runs(
    plans: Sequence[Configuration],
    belief: Posterior,
    runs: Sequence[Configuration] = (),
    iterations: int = ITERATIONS,
    startup_s: float | None = None,
) -> list[ShortRun]:
    """The runs (those given, else the plans and smaller versions of them), the most worthwhile first.

    A run of plan x moves the belief about plan i by s_i z, z standard normal, s_i = cov(i, x) / sd of x's measured
    ln(seconds). The regret that it saves is min(mean) - E min(mean + s z): the knowledge gradient (Frazier, Powell and
    Dayanik 2009, 'The knowledge-gradient policy for correlated normal beliefs', section 3), here summed over
    DRAWS quantiles of z. Left out: that several runs together may be worth more than their sum.
    """
    from scipy.stats import norm

    runs = list(runs) or siblings(plans)
    mean, everything = _per_sequence(plans, belief), belief.covariance([*plans, *runs])
    winner, known = int(np.argmin(mean)), len(plans)
    z = norm.ppf((np.arange(DRAWS) + 0.5) / DRAWS)
    found = []
    for number, run in enumerate(runs, known):
        moves = everything[:known, number] / np.sqrt(everything[number, number] + belief.noise**2)
        saved = float(mean.min() - (mean[:, None] + moves[:, None] * z).min(axis=0).mean())
        left = max(everything[winner, winner] - moves[winner] ** 2, 0.0)
        seconds = float(np.exp(belief.expected([run])[0]))
        start = STARTUP_S[run.cluster.gpu.kind] if startup_s is None else startup_s
        cost = run.topology.gpus * (start + iterations * seconds) / 3600
        found.append((run, cost, max(saved, 0.0), float(moves[winner] ** 2), float(left)))
    which = max(saved for _, _, saved, _, _ in found) > CERTAIN
    short = []
    for run, cost, saved, taken, left in found:
        worth, width = (saved if which else taken) / cost, 1.645 * left**0.5
        short.append(ShortRun(case=run, gpu_hours=cost, regret_saved=saved, half_width_after=width, worth=worth))
    return sorted(short, key=lambda s: -s.worth)


def siblings(plans: Sequence[Configuration]) -> list[Configuration]:
    """The plans, and each with a half, a quarter, ... of its replicas and batch: the same pipeline on fewer GPUs.

    Those that more likely than not run out of memory are left out: nothing would be measured.
    """
    found: dict[tuple[object, Topology], Configuration] = {}
    for plan in plans:
        t, dp = plan.topology, plan.topology.dp
        while dp >= 1:
            smaller = replace(t, dp=dp, gbs=t.gbs * dp // t.dp)
            if _fits(case := replace(plan, topology=smaller)):
                found.setdefault((plan.shape, smaller), case)
            if dp % 2:
                break
            dp //= 2
    return list(found.values()) or list(plans)


def _fits(case: Configuration) -> bool:
    need = memory_bytes(columns_of(case.shape, case.topology, case.engine), case.cluster)
    return float(oom_probability(need, case.cluster)) <= 0.5


def _per_sequence(plans: Sequence[Configuration], belief: Posterior) -> np.ndarray:
    """ln(seconds) per sequence, which compares plans of different batch sizes."""
    return belief.expected(plans) - np.log([p.topology.gbs for p in plans])
