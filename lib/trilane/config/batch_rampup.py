"""Ramp: a batch size that grows while the run consumes samples, as Megatron-LM counts it."""

from collections.abc import Iterable

from trilane.config.options import Rules, check, option
from trilane.config.parallelism import Topology
from trilane.utils.frozen import frozen
from trilane.utils.validation import parse_integers, require


@frozen
class Phase:
    """Consecutive iterations of one batch size: `iterations` x `gbs` samples, the first of them
    sample `first`.
    """

    gbs: int
    iterations: int
    first: int


@frozen
class Batch:
    """One iteration's samples: iteration `number`, counted from 1, takes `gbs` of them, the first
    is sample `first`.
    """

    number: int
    first: int
    gbs: int

    @property
    def end(self) -> int:
        """Samples consumed once it is done."""
        return self.first + self.gbs


@frozen
class Ramp:
    """From `start` sequences an iteration to the plan's gbs in steps of `increment`, over
    `samples`; 0: constant.

    Megatron-LM's --rampup-batch-size START INCREMENT SAMPLES (num_microbatches_calculator.py): the
    ramp's samples are shared out evenly among its n = (gbs - start) / increment steps; c consumed
    samples mean step floor(c n / samples).
    """

    start: int = option(0, "sequences of the first iteration")
    increment: int = option(0, "sequences that each step adds")
    samples: int = option(0, "samples of the ramp-up; 0: constant batch size")

    def __post_init__(self) -> None:
        check(self, "ramp.")

    def rules(self) -> Rules:
        """A ramp needs all three."""
        yield self.start > 0 or not self.samples, "start", "must be above 0"
        yield self.increment > 0 or not self.samples, "increment", "must be above 0"

    def _sizes(self, gbs: int) -> range:
        """The batch sizes on the way to `gbs`."""
        if not self.samples:
            return range(0)
        ends = self.start <= gbs and (gbs - self.start) % self.increment == 0
        rule = f"must divide the way from start={self.start} up to gbs={gbs}"
        require(ends, "ramp.increment", self.increment, rule)
        return range(self.start, gbs, self.increment)

    def between(self, gbs: int, first: int, last: int) -> list[Phase]:
        """The phases of the iterations after the first `first`, up to number `last`, cut there.
        ValueError where the steps do not end at `gbs`. A step may be skipped altogether.
        """
        phases = []
        done = 0
        consumed = 0
        sizes = self._sizes(gbs)
        for step, batch in enumerate([*sizes, gbs], 1):
            iterations = last
            if batch < gbs:
                # the first sample of the next step, rounded up
                next_step = -(-step * self.samples // len(sizes))
                iterations = max(0, -(-(next_step - consumed) // batch))
            begin = max(first, done)
            end = min(last, done + iterations)
            if begin < end:
                sample = consumed + (begin - done) * batch
                phases.append(Phase(gbs=batch, iterations=end - begin, first=sample))
            done += iterations
            consumed += iterations * batch
        return phases

    def iterations(self, samples: int, gbs: int) -> int:
        """Iterations until at least `samples` are consumed."""
        done = 0
        for phase in self.between(gbs, 0, samples):
            if phase.first < samples:
                done += min(phase.iterations, -(-(samples - phase.first) // phase.gbs))
        return done

    def consumed(self, iterations: int, gbs: int) -> int:
        """Samples after so many iterations."""
        return sum(phase.gbs * phase.iterations for phase in self.between(gbs, 0, iterations))

    def require_whole(self, t: Topology, phases: Iterable[Phase]) -> None:
        """ValueError unless each replica gets whole microbatches (with interleaving rounds of pp of
        them) in these phases.
        """
        rule = f"every batch size must be a multiple of mbs x dp = {t.mbs} x {t.dp}"
        unit = t.mbs * t.dp
        if t.interleaving > 1:
            unit *= t.pp
            rule += f", times pp={t.pp} with interleaving"
        for phase in phases:
            require(phase.gbs % unit == 0, "ramp", phase.gbs, rule)


def parse_ramp(text: str) -> Ramp:
    """The ramp of "START,INCREMENT,SAMPLES", such as "192,16,9765625"; ValueError otherwise."""
    # as int() reads them, and so Megatron-LM: 9_765_625
    numbers = parse_integers("ramp", text.replace("_", ""))
    require(len(numbers) == 3, "ramp", text, "must be three whole numbers: START,INCREMENT,SAMPLES")
    start, increment, samples = numbers
    return Ramp(start=start, increment=increment, samples=samples)
