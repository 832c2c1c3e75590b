"""A/B comparison: whether the runs of B differ from those of A by more than repeated runs of one
configuration do.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.analysis.measure import Measurement
from trilane.utils.validation import require

# Seven pairs of runs of one configuration on one day among the shipped rows differ by 0.6, 1.1,
# 1.1, 1.4, 2.7, 9.0 and
# 15.5 % (tests recompute it). A claim on single runs must exceed their mean square. On another day
# the network may differ: 76 % once.
SINGLE_DEVIATION = 0.049  # of ln(seconds)
SINGLE_FREEDOM = 7


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B relative to A by the medians of their runs; `change` is ln(B / A) of the time, below 0
    where B is faster.

    low, high      its confidence interval; `decided` where 0 lies outside
    deviation      of ln(seconds) between runs of one side; `source` is where that number comes from
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
    notes: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether the difference exceeds the spread between runs."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """The result, with its interval."""
        size, ends = abs(math.expm1(self.change)), (math.expm1(self.low), math.expm1(self.high))
        if self.decided:
            near, far = sorted(map(abs, ends))
            word = "faster" if self.change < 0 else "slower"
            return f"B is {size:.1%} {word} ({near:.1%} to {far:.1%}, {self.confidence:.0%})"
        change = f"{size:.1%} {'less' if self.change < 0 else 'more'} time than A"
        span = f"{ends[0]:+.1%} to {ends[1]:+.1%} ({self.confidence:.0%})"
        return f"no difference shown: B takes {change}, which may be {span}; more runs a side narrow that"

    def __str__(self) -> str:
        unit = "an iteration" if self.unit == "iteration" else "a token"
        seconds = f"A {self.seconds_a:.4g} s, B {self.seconds_b:.4g} s {unit} ({self.runs_a} and {self.runs_b} runs)"
        spread = f"spread between runs {self.deviation:.2%}: {self.source}"
        return "\n".join([self.sentence, seconds, spread, *self.notes])


def compare(
    a: Sequence[Measurement], b: Sequence[Measurement], confidence: float = 0.95
) -> Comparison:
    """The comparison of two sets of runs; ValueError where a side has no run with a time.

        compare(measure_path("a.log"), measure_path("b.log")).sentence

    Several runs on both sides: Welch's t on the logarithms of the runs' medians. Several on one
    side: its spread counts for both. One run a side: iterations of one run share its nodes and its
    day, so their spread is not the spread between runs; that of SINGLE_DEVIATION stands in. Where
    batch or sequence length differ the time of a token counts. Left out: trends with the order in
    which the runs ran; interleave A and B.
    """
    from scipy.stats import t

    require(0.5 <= confidence < 1, "confidence", confidence, "must lie between 0.5 and 1")
    sizes = [m.tokens_per_s * m.sec_per_it for m in (*a, *b)]
    per_token = not any(map(math.isnan, sizes)) and max(sizes, default=0) > 1.001 * min(
        sizes, default=0
    )
    sides = []
    for name, runs in (("A", a), ("B", b)):
        times = [1 / m.tokens_per_s if per_token else m.sec_per_it for m in runs]
        sides.append(np.log([seconds for seconds in times if 0 < seconds < math.inf]))
        require(len(sides[-1]) > 0, name, "no run", "of these has a time of an iteration")
    x, y = sides
    middle_a, middle_b = (float(np.mean(side)) for side in sides)
    deviation, error, freedom, source = _spread(x, y, max(map(_own_error, (*a, *b))))
    change, reach = middle_b - middle_a, float(t.ppf((1 + confidence) / 2, freedom)) * error
    found: dict[str, Any] = {"runs_a": len(x), "runs_b": len(y)}
    found |= {"seconds_a": math.exp(middle_a), "seconds_b": math.exp(middle_b), "change": change}
    found |= {"low": change - reach, "high": change + reach, "confidence": confidence}
    found |= {"deviation": deviation, "source": source, "notes": tuple(_notes(a, b))}
    return Comparison(**found, unit="token" if per_token else "iteration")


def _spread(x: np.ndarray, y: np.ndarray, least: float) -> tuple[float, float, float, str]:
    """Deviation between runs, standard error of the difference, degrees of freedom, and where they
    come from.
    """
    m, n = len(x), len(y)
    if m > 1 and n > 1:
        u, v = (max(float(np.var(z, ddof=1)), least**2) for z in (x, y))
        freedom = (u / m + v / n) ** 2 / ((u / m) ** 2 / (m - 1) + (v / n) ** 2 / (n - 1))
        return (
            math.sqrt((u + v) / 2),
            math.sqrt(u / m + v / n),
            freedom,
            f"measured between {m} and {n} runs",
        )
    side, many = ("A", x) if m > 1 else ("B", y)
    deviation, freedom = max(SINGLE_DEVIATION, least), float(SINGLE_FREEDOM)
    source = "one run a side: taken from repeats of one configuration on one day, 7 pairs on Jean Zay (2021, 2022)"
    if len(many) > 1:
        deviation, freedom = max(float(np.std(many, ddof=1)), least), len(many) - 1
        source = f"measured between the {len(many)} runs of {side}, taken for both"
    return deviation, deviation * math.sqrt(1 / m + 1 / n), freedom, source


def _own_error(m: Measurement) -> float:
    """Standard error of a run's own median, a lower bound of any comparison's."""
    return (
        1.25 * 1.4826 * m.spread / math.sqrt(m.iterations)
        if m.iterations and m.spread > 0
        else 1e-6
    )


def _notes(a: Sequence[Measurement], b: Sequence[Measurement]) -> Iterator[str]:
    for side, runs in (("A", a), ("B", b)):
        if (
            len(
                {
                    (m.config.shape, m.config.tp, m.config.pp, m.config.dp, m.config.mbs)
                    for m in runs
                }
            )
            > 1
        ):
            yield f"the runs of {side} differ among themselves in shape or topology"
        yield from (
            f"the time of {m.name} of {side} is open: {m.time_problems[0]}"
            for m in runs
            if m.time_problems
        )
    one, other = ({m.config.gpus for m in runs} - {0} for runs in (a, b))
    if one and other and one != other:
        yield "A ran on {} GPUs, B on {}".format(
            *(" or ".join(map(str, sorted(n))) for n in (one, other))
        )
