"""A/B comparison: whether the runs of B differ from those of A by more than repeated runs of one configuration do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.analysis.measure import Measurement
from trilane.utils.tables import Text
from trilane.utils.validation import require

# Seven pairs of runs of one configuration on one day among the shipped rows differ by 0.6, 1.1, 1.1, 1.4, 2.7, 9.0 and
# 15.5 % (tests recompute it). A claim on single runs must exceed their mean square; the number of repeats is computed
# from their median, the usual difference. On another day the network may differ: 76 % once.
SINGLE_DEVIATION, SINGLE_FREEDOM = 0.049, 7
USUAL_DEVIATION = 0.0144
POWER = 0.8
MOST_REPEATS = 1000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B relative to A by the medians of their runs; `change` is ln(B / A) of the time, below 0 where B is faster.

    low, high      its confidence interval; `decided` where 0 lies outside
    deviation      of ln(seconds) between runs of one side; `source` is where that number comes from
    repeats        runs a side that would decide a difference as large as the one seen with 80 % power; 0 for more than
                   MOST_REPEATS
    """

    runs_a: int
    runs_b: int
    unit: str
    seconds_a: float
    seconds_b: float
    change: float
    low: float
    high: float
    confidence: float
    deviation: float
    source: str
    repeats: int
    notes: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether the difference exceeds the spread between runs."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """The result in words."""
        if self.decided:
            near, far = sorted(abs(math.expm1(c)) for c in (self.low, self.high))
            word = "faster" if self.change < 0 else "slower"
            return f"B is {abs(math.expm1(self.change)):.1%} {word} ({near:.1%} to {far:.1%}, {self.confidence:.0%})"
        span = f"{math.expm1(self.low):+.1%} to {math.expm1(self.high):+.1%}"
        more = f"{self.repeats} runs a side" if self.repeats else f"more than {MOST_REPEATS} runs a side"
        word = "less" if self.change < 0 else "more"
        return (
            f"no difference shown: B takes {abs(math.expm1(self.change)):.1%} {word} time than A, which may be {span} "
            f"({self.confidence:.0%}); to show a difference of that size takes {more}"
        )

    def __str__(self) -> str:
        """The verdict and what it rests on."""
        lines = [
            self.sentence,
            f"A {self.seconds_a:.4g} s, B {self.seconds_b:.4g} s a{'n' * (self.unit == 'iteration')} {self.unit} "
            f"({self.runs_a} and {self.runs_b} runs)",
            f"spread between runs {self.deviation:.2%}: {self.source}",
        ]
        return "\n".join([*lines, *self.notes])

    def as_text(self) -> Text:
        """The verdict and the spread that it rests on, for a notebook."""
        notes = "; ".join(self.notes)
        spread = Text.of("Spread between runs {:.1%}: {}. {}", self.deviation, self.source, notes)
        return Text.of("**{}.** {}", self.sentence, spread)


def compare(a: Sequence[Measurement], b: Sequence[Measurement], confidence: float = 0.95) -> Comparison:
    """The comparison of two sets of runs; ValueError where a side has no run with a time.

    Several runs on both sides: Welch's t on the logarithms of the runs' medians. Several on one side: its spread
    counts for both. One run a side: iterations of one run share its nodes and its day, so their spread is not the
    spread between runs; that of SINGLE_DEVIATION stands in. Where batch or sequence length differ the time of a token
    counts. Left out: trends with the order in which the runs ran; interleave A and B.
    """
    from scipy.stats import t

    require(0.5 <= confidence < 1, "confidence", confidence, "must lie between 0.5 and 1")
    times, unit = _times(a, b)
    for side, seconds in zip("AB", times, strict=True):
        require(bool(len(seconds)), side, "no run", "of these has a time of an iteration")
    x, y = (np.log(seconds) for seconds in times)
    error, deviation, freedom, source = _spread(x, y, max(_floor(a), _floor(b)))
    change = float(np.mean(y) - np.mean(x))
    reach = float(t.ppf((1 + confidence) / 2, freedom)) * error
    return Comparison(
        runs_a=len(x),
        runs_b=len(y),
        unit=unit,
        seconds_a=float(np.exp(np.mean(x))),
        seconds_b=float(np.exp(np.mean(y))),
        change=change,
        low=change - reach,
        high=change + reach,
        confidence=confidence,
        deviation=deviation,
        source=source,
        repeats=repeats_needed(change, deviation if min(len(x), len(y)) > 1 else USUAL_DEVIATION, confidence),
        notes=_notes(a, b),
    )


def sides(runs: Sequence[Measurement], a: str, b: str) -> tuple[list[Measurement], list[Measurement]]:
    """The runs with `a` in their names or paths, and those with `b`; without both the two fastest topologies.

    Raises ValueError where a word fits no run, or only one is given. Both empty where there are not two topologies.
    """
    require(bool(a) == bool(b), "b" if a else "a", "''", "name both sides, or none")
    if a:
        chosen = [[m for m in runs if word in m.name or word in str(m.log.source)] for word in (a, b)]
        for word, found in zip((a, b), chosen, strict=True):
            require(bool(found), "a" if found is chosen[0] else "b", word, "is in no run's name")
        return chosen[0], chosen[1]
    groups: dict[object, list[Measurement]] = {}
    for m in sorted((m for m in runs if m.sec_per_it > 0), key=lambda m: m.sec_per_it):
        s = m.config
        groups.setdefault((s.shape, s.gbs, s.tp, s.pp, s.dp, s.mbs) if s.gpus else m.name, []).append(m)
    first, *others = list(groups.values()) or [[]]
    alike = [g for g in others if g[0].config.shape == first[0].config.shape and g[0].config.gbs == first[0].config.gbs]
    return (first, alike[0]) if alike else ([], [])


def repeats_needed(change: float, deviation: float, confidence: float = 0.95) -> int:
    """Runs a side, at least 2, after which Welch's test finds `change` with POWER; 0 above MOST_REPEATS.

    The smallest n with n >= 2 (t_(1+confidence)/2 + t_power)^2 deviation^2 / change^2, t of 2 n - 2 degrees.
    """
    from scipy.stats import t

    n = np.arange(2, MOST_REPEATS + 1)
    quantiles = t.ppf((1 + confidence) / 2, 2 * n - 2) + t.ppf(POWER, 2 * n - 2)
    enough = n * change**2 >= 2 * (quantiles * deviation) ** 2
    return int(n[enough][0]) if enough.any() else 0


def _spread(x: np.ndarray, y: np.ndarray, least: float) -> tuple[float, float, float, str]:
    """Standard error of the difference, deviation between runs, degrees of freedom, and where they come from."""
    m, n = len(x), len(y)
    if m > 1 and n > 1:
        u, v = (max(float(np.var(z, ddof=1)), least**2) for z in (x, y))
        freedom = (u / m + v / n) ** 2 / ((u / m) ** 2 / (m - 1) + (v / n) ** 2 / (n - 1))
        return math.sqrt(u / m + v / n), math.sqrt((u + v) / 2), freedom, f"measured between {m} and {n} runs"
    if m > 1 or n > 1:
        side, many = ("A", x) if m > 1 else ("B", y)
        deviation = max(float(np.std(many, ddof=1)), least)
        source = f"measured between the {len(many)} runs of {side}, taken for both"
        return deviation * math.sqrt(1 / m + 1 / n), deviation, len(many) - 1, source
    source = "one run a side: taken from repeats of one configuration on one day, 7 pairs on Jean Zay (2021, 2022)"
    deviation = max(SINGLE_DEVIATION, least)
    return deviation * math.sqrt(2), deviation, SINGLE_FREEDOM, source


def _floor(runs: Sequence[Measurement]) -> float:
    """Standard error of a run's own median, a lower bound of any comparison's."""
    errors = [1.25 * 1.4826 * m.spread / math.sqrt(m.iterations) for m in runs if m.iterations and m.spread == m.spread]
    return max(errors, default=0.0) or 1e-6


def _times(a: Sequence[Measurement], b: Sequence[Measurement]) -> tuple[list[np.ndarray], str]:
    """Each side's times and their unit: per iteration, or per token where iterations differ in size."""
    runs = [*a, *b]
    sizes = {m.tokens_per_s * m.sec_per_it for m in runs}
    per_token = all(s == s for s in sizes) and max(sizes, default=0) > 1.001 * min(sizes, default=0)
    values = [[1 / m.tokens_per_s if per_token else m.sec_per_it for m in side] for side in (a, b)]
    return [np.array([v for v in side if 0 < v < math.inf]) for side in values], "token" if per_token else "iteration"


def _notes(a: Sequence[Measurement], b: Sequence[Measurement]) -> tuple[str, ...]:
    notes = []
    for side, runs in (("A", a), ("B", b)):
        kinds = {(m.config.shape, m.config.tp, m.config.pp, m.config.dp, m.config.mbs) for m in runs}
        if len(kinds) > 1:
            notes.append(f"the runs of {side} differ among themselves in shape or topology")
        notes += [f"the time of {m.name} of {side} is open: {m.time_problems[0]}" for m in runs if m.time_problems]
    gpus = [{m.config.gpus for m in runs if m.config.gpus} for runs in (a, b)]
    if all(gpus) and gpus[0] != gpus[1]:
        one, other = (" or ".join(map(str, sorted(numbers))) for numbers in gpus)
        notes.append(f"A ran on {one} GPUs, B on {other}")
    return tuple(notes)
