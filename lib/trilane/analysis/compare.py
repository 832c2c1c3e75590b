"""A/B comparison: whether the runs of B differ from those of A by more than repeated runs of one
configuration do.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from trilane.analysis.measure import Measurement
from trilane.utils.frozen import frozen
from trilane.utils.tables import Record
from trilane.utils.validation import require

# Seven pairs of runs of one configuration on one day among the shipped rows differ by 0.6, 1.1,
# 1.1, 1.4, 2.7, 9.0 and 15.5 % (a test recomputes it). A claim on single runs must exceed their
# mean square. On another day the network may differ: 76 % once.
SINGLE_DEVIATION = 0.049  # of ln(seconds)
SINGLE_FREEDOM = 7
CONFIDENCE = 0.95  # of the interval
SINGLE_SOURCE = "of repeats of one configuration on one day, 7 pairs on Jean Zay"


@frozen
class Comparison(Record):
    """B relative to A by the medians of their runs; `change` is ln(B / A) of the time, below 0
    where B is faster.

    low, high      its 95 % interval; `decided` where 0 lies outside
    deviation      of ln(seconds) between runs of one side; `source` is where that number comes from
    """

    DERIVED: ClassVar = ("decided", "verdict")
    runs_a: int
    runs_b: int
    unit: str
    seconds_a: float
    seconds_b: float
    change: float
    low: float
    high: float
    deviation: float
    source: str

    @property
    def decided(self) -> bool:
        """Whether the difference exceeds the spread between runs."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """The result, with its interval."""
        ratio, low, high = (math.exp(x) for x in (self.change, self.low, self.high))
        text = f"B takes {ratio:.3f} of A's time ({low:.3f} to {high:.3f}, 95 %)"
        if self.decided:
            return f"B is {'faster' if ratio < 1 else 'slower'}: {text}"
        return f"no difference shown: {text}; more runs a side narrow that"

    def summary(self) -> str:
        """The result, the seconds of both sides, the spread between runs, in lines."""
        seconds = f"A {self.seconds_a:.4g} s, B {self.seconds_b:.4g} s per {self.unit}"
        runs = f"{seconds} ({self.runs_a} and {self.runs_b} runs)"
        spread = f"spread between runs {self.deviation:.2%}: {self.source}"
        return "\n".join([self.verdict, runs, spread])


def compare(a: Sequence[Measurement], b: Sequence[Measurement]) -> Comparison:
    """The comparison of two sets of runs; ValueError where a side has no run with a time.

        compare(measure_path("a.log"), measure_path("b.log")).verdict

    Student's t on the logarithms of the runs' medians, with one spread for both sides. One run a
    side: iterations of one run share its nodes and its
    day, so their spread is not the spread between runs; that of SINGLE_DEVIATION stands in. Where
    batch or sequence length differ the time of a token counts. Left out: trends with the order in
    which the runs ran; interleave A and B.
    """
    from scipy.stats import t

    tokens = np.array([run.tokens_per_s * run.sec_per_it for run in (*a, *b)])
    per_token = len(tokens) > 0 and tokens.max() > 1.001 * tokens.min()  # False for NaN
    x = _log_seconds("A", a, per_token)
    y = _log_seconds("B", b, per_token)
    deviation, freedom, source = _spread(x, y)
    change = float(y.mean() - x.mean())
    error = deviation * math.sqrt(1 / len(x) + 1 / len(y))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Comparison(
        runs_a=len(x),
        runs_b=len(y),
        unit="token" if per_token else "iteration",
        seconds_a=math.exp(x.mean()),
        seconds_b=math.exp(y.mean()),
        change=change,
        low=change - reach,
        high=change + reach,
        deviation=deviation,
        source=source,
    )


def _log_seconds(side: str, runs: Sequence[Measurement], per_token: bool) -> np.ndarray:
    seconds = np.array([1 / run.tokens_per_s if per_token else run.sec_per_it for run in runs])
    seconds = seconds[(seconds > 0) & (seconds < math.inf)]
    require(len(seconds) > 0, side, "no run", "of these has a time of an iteration")
    return np.log(seconds)


def _spread(x: np.ndarray, y: np.ndarray) -> tuple[float, int, str]:
    """Deviation between the runs of one side, its degrees of freedom, and where it comes from."""
    freedom = len(x) + len(y) - 2
    if not freedom:
        return SINGLE_DEVIATION, SINGLE_FREEDOM, SINGLE_SOURCE
    squares = float(((x - x.mean()) ** 2).sum() + ((y - y.mean()) ** 2).sum())
    return math.sqrt(squares / freedom), freedom, "of these runs"
