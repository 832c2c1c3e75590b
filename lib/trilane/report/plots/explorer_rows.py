"""What the explorer of a search draws of its plans: the plans themselves, their words, and their pipeline schedules."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from trilane.costmodel.pipeline import Pass, PipelineSchedule, pipeline_schedule
from trilane.costmodel.predict import RISKY, Prediction
from trilane.planning.proposals import training_days
from trilane.planning.search_result import Candidate, SearchResult, ranks
from trilane.report.plots.style import GIB, plain
from trilane.utils.numbers import amount, with_bounds, with_interval

MOST = 40  # plans
STAGES = 16  # that are drawn of one plan
LINE = 42  # characters of a line of text
RISKS = ("below 1 %", "1 to 10 %", "above 10 %")  # of running out of memory
Row = dict[str, Any]


def shown_plans(found: SearchResult) -> list[Candidate]:
    """The plans of the explorer, the best first: three quarters of MOST at most by speed, the rest others.

    Whatever the search kept: a front of thousands is thinned evenly, its fastest and its smallest plan kept.
    """
    chosen = {c.plan.id: c for c in found.best(3 * MOST // 4).rows}
    risky: dict[tuple[int, ...], Candidate] = {}
    for c in found.risky:
        risky.setdefault((c.topology.tp, c.topology.pp, c.topology.dp), c)
    free = MOST - len(chosen)
    others = [*spread(found.pareto, free - min(len(risky), free // 3)), *risky.values()]
    for c in others:
        if len(chosen) < MOST:
            chosen.setdefault(c.plan.id, c)
    return sorted(chosen.values(), key=lambda c: (c.prediction.is_risky, c.prediction.sec_per_it))


def spread(values: Iterable[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly chosen, the first and the last among them."""
    every = list(values)
    if len(every) <= most:
        return every
    return [every[round(i * (len(every) - 1) / max(most - 1, 1))] for i in range(most)]


def plan_rows(shown: list[Candidate], ranked: dict[str, str]) -> list[Row]:
    """A row a plan: what the panels of all plans draw; `ranked`: the ranks by id, of which `1=` is a tie."""
    rows = []
    for c in shown:
        p, t, id = c.prediction, c.topology, c.plan.id
        risk, rank = RISKS[(p.oom_probability >= 0.01) + (p.oom_probability > RISKY)], ranked.get(id, "")
        values = {"id": id, "label": plain(c.label), "gpus": t.gpus, "tp": t.tp, "pp": t.pp, "dp": t.dp}
        values |= {"rank": rank, "tie": rank if rank.endswith("=") else "", "risk": risk}
        values |= {"s": four(p.sec_per_it), "lo": four(p.sec_lo), "hi": four(p.sec_hi)}
        rows.append({**values, "gib": four(p.memory_bytes / GIB), "oom": round(p.oom_probability, 3)})
    return rows


def ranks_by_id(found: SearchResult) -> dict[str, str]:
    """The ranks that the table of the best plan of each TP x PP x DP gives them."""
    best = found.best_per_sizes(MOST).rows
    order = ranks([c.prediction.sec_per_it for c in best])
    return {c.plan.id: rank for c, rank in zip(best, order, strict=True)}


def four(value: float) -> float:
    """Four significant digits: a drawn number is not more exact."""
    return float(f"{value:.4g}")


class Drawn:
    """The schedule of one plan as it is drawn: at most so many passes, which microbatches and stages they are."""

    def __init__(self, candidate: Candidate, budget: int):
        t = candidate.topology
        self.id, self.of, self.chunks = candidate.plan.id, t.microbatches, t.interleaving
        self.microbatches = min(self.of, max(2 * t.pp, 8))
        if 2 * t.pp * self.microbatches * t.interleaving > budget:
            self.microbatches = min(self.of, max(t.pp, 4))
        if t.interleaving > 1:
            self.microbatches -= self.microbatches % t.pp  # rounds of pp
        self.made: PipelineSchedule = pipeline_schedule(t, candidate.prediction, self.microbatches)
        most = max(min(budget // (2 * self.microbatches * t.interleaving), STAGES), 2)
        self.stages = sorted({*spread(range(t.pp), most), self.made.slowest})
        self.passes, self.after = list(self._passes()), list(self._after())

    def _passes(self) -> Iterator[Row]:
        """A row for each stage, kind and model chunk, with the start of each of its microbatches, in seconds."""
        groups: dict[tuple[int, bool, int], list[Pass]] = {}
        for each in (p for p in self.made.passes if p.stage in self.stages):
            groups.setdefault((each.stage, each.is_forward, each.chunk), []).append(each)
        for (stage, is_forward, chunk), own in groups.items():
            row = {"id": self.id, "stage": stage, "kind": "forward" if is_forward else "backward", "chunk": chunk}
            row |= {"shade": round(1 - 0.6 * chunk / self.chunks, 2), "length": four(own[0].end - own[0].start)}
            yield {**row, "start": [four(p.start) for p in own]}

    def _after(self) -> Iterator[Row]:
        """What every stage does after its last pass."""
        start = self.made.pipeline_end
        for kind, seconds in (("gradients", self.made.data_parallel), ("optimizer", self.made.optimizer)):
            row = {"id": self.id, "kind": kind, "start": four(start), "end": four(start + seconds)}
            yield {**row, "length": four(seconds), "stage": self.stages}
            start += seconds


def lines(c: Candidate, tokens: float, drawn: Drawn) -> Iterator[Row]:
    """What is written about a plan, line by line."""
    p, t, made = c.prediction, c.topology, drawn.made
    every = [training_days(c.plan.shape, t, seconds, tokens) for seconds in (p.sec_per_it, p.sec_lo, p.sec_hi)]
    size, word = (1e9, "billion") if tokens >= 1e9 else (1e6, "million")
    unit, many = ("GPUs", "processes")[c.plan.cluster.gpu.kind == "cpu"], "" if t.microbatches == 1 else "es"
    texts = [
        f"{t.gpus} {unit} = TP {t.tp}{f' x CP {t.cp}' * (t.cp > 1)} x PP {t.pp} x DP {t.dp}; id {drawn.id}",
        f"{t.gbs} sequences an iteration: {t.microbatches} microbatch{many} of {t.mbs}",
        "{} s an iteration ({} to {} s with 90 %)".format(*with_interval(p.sec_per_it, p.sec_lo, p.sec_hi)),
        f"{p.memory_bytes / GIB:.3g} GiB on the fullest stage, out of memory with {_chance(p.oom_probability)}",
        f"{amount(tokens / size)} {word} tokens: {with_bounds(*every)} days, no interruptions",
        *_pipeline_lines(p, made, drawn),
        f"Evidence: {p.support.words}",
    ]
    look: Any = {"width": LINE, "subsequent_indent": "   ", "break_on_hyphens": False}
    wrapped = (line for text in (plain(c.label), *texts) for line in textwrap.wrap(text, **look))
    return ({"id": drawn.id, "n": n, "line": line} for n, line in enumerate(wrapped))


def _chance(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else "less than 0.1%"


def _pipeline_lines(p: Prediction, made: PipelineSchedule, drawn: Drawn) -> list[str]:
    """Which stage drags, how long the bubble is, and what of the schedule is drawn."""
    stages, slow = made.stage_seconds, made.slowest
    many = f"{drawn.microbatches} of {drawn.of} microbatches" if drawn.microbatches < drawn.of else "every microbatch"
    if len(stages) == 1:
        return [f"No pipeline; drawn: {many}"]
    over = stages[slow] / (sum(stages) / len(stages)) - 1
    drags = f"stage {slow} is the slowest, {over:.1%} above the mean" if over > 1e-3 else "all stages are equally fast"
    rest = ", the others repeat the middle" if drawn.microbatches < drawn.of else ""
    where = f"; {len(drawn.stages)} of {len(stages)} stages" if len(drawn.stages) < len(stages) else ""
    return [f"Bubble {p.time.bubble / p.sec_per_it:.1%} of the iteration; {drags}", f"Drawn: {many}{where}{rest}"]
