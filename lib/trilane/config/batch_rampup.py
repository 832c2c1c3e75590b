"""Ramp: a batch size that grows while the run consumes samples, as Megatron-LM counts it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from trilane.config.options import check, option
from trilane.config.parallelism import Topology, dividing
from trilane.utils.validation import is_count, require


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive iterations of one batch size: `iterations` x `gbs` samples, the first of them
    sample `first`.
    """

    gbs: int
    iterations: int
    first: int


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """From `start` sequences an iteration to the plan's gbs in steps of `increment`, over
    `samples`; 0: constant.

    Megatron-LM's --rampup-batch-size START INCREMENT SAMPLES (num_microbatches_calculator.py): the
    ramp's samples are shared out evenly among its n = (gbs - start) / increment steps; c consumed
    samples mean step floor(c n / samples).
    """

    start: int = option(0, "sequences of the first iteration", minimum=0)
    increment: int = option(0, "sequences that each step adds", minimum=0)
    samples: int = option(0, "samples of the ramp-up; 0: constant batch size", minimum=0)

    def __post_init__(self) -> None:
        check(self, "ramp.")
        for name in ("start", "increment") if self.samples else ():
            require(getattr(self, name) > 0, f"ramp.{name}", getattr(self, name), "must be above 0")

    def steps(self, gbs: int) -> int:
        """How often the batch grows on its way to `gbs`; ValueError where the steps do not end
        there.
        """
        if not self.samples:
            return 0
        require(self.start <= gbs, "ramp.start", self.start, f"must not be above gbs={gbs}")
        way, rule = gbs - self.start, f"must divide the way from start={self.start} to gbs={gbs}"
        require(
            way % self.increment == 0,
            "ramp.increment",
            self.increment,
            rule + dividing(way, self.increment),
        )
        return (gbs - self.start) // self.increment

    def phases(self, gbs: int) -> list[Phase]:
        """The phases below `gbs`, in order. A step that one iteration skips altogether has no
        phase.
        """
        phases: list[Phase] = []
        consumed, steps = 0, self.steps(gbs)
        for step in range(steps):
            end = -(
                -(step + 1) * self.samples // steps
            )  # the first sample that belongs to the next step
            batch = self.start + step * self.increment
            iterations = max(0, -(-(end - consumed) // batch))
            if iterations:
                phases.append(Phase(gbs=batch, iterations=iterations, first=consumed))
            consumed += batch * iterations
        return phases

    def _starts(self, gbs: int) -> list[tuple[int, int, int]]:
        """Where each phase begins, the constant one last: iterations done, samples consumed, its
        batch size.
        """
        found, done, consumed = list[tuple[int, int, int]](), 0, 0
        for phase in self.phases(gbs):
            found.append((done, consumed, phase.gbs))
            done, consumed = done + phase.iterations, consumed + phase.gbs * phase.iterations
        return [*found, (done, consumed, gbs)]

    def iterations(self, samples: int, gbs: int) -> int:
        """Iterations until at least `samples` are consumed."""
        done, consumed, batch = [start for start in self._starts(gbs) if start[1] <= samples][-1]
        return done - (consumed - samples) // batch

    def consumed(self, iterations: int, gbs: int) -> int:
        """Samples after so many iterations."""
        done, consumed, batch = [start for start in self._starts(gbs) if start[0] <= iterations][-1]
        return consumed + (iterations - done) * batch

    def batches(self, iterations: int, gbs: int, done: int = 0) -> Iterator[Batch]:
        """The iterations after the first `done`, up to number `iterations`, one by one."""
        for phase in self.between(gbs, done, iterations):
            for turn in range(phase.iterations):
                yield Batch(
                    number=done + turn + 1, first=phase.first + turn * phase.gbs, gbs=phase.gbs
                )
            done += phase.iterations

    def between(self, gbs: int, first: int, last: int) -> list[Phase]:
        """The phases of the iterations after the first `first`, up to number `last`, cut there."""
        starts, found = self._starts(gbs), list[Phase]()
        for (done, consumed, batch), (end, *_) in pairwise([*starts, (last, 0, 0)]):
            begin, end = max(first, done), min(last, end)
            if begin < end:
                found.append(
                    Phase(
                        gbs=batch, iterations=end - begin, first=consumed + (begin - done) * batch
                    )
                )
        return found

    def require_whole(
        self, t: Topology, sizes: Iterable[int] | None = None, also: str = ""
    ) -> None:
        """ValueError unless each replica gets whole microbatches (with interleaving rounds of pp of
        them) at every size or these `sizes`; `also` would do.
        """
        groups = t.pp if t.interleaving > 1 else 1
        unit = t.mbs * t.dp * groups
        every = [*(self.start + step * self.increment for step in range(self.steps(t.gbs))), t.gbs]
        if failing := sorted(size for size in (every if sizes is None else sizes) if size % unit):
            rule = f"every batch size must be a multiple of mbs x dp = {t.mbs} x {t.dp}"
            rule += f", times pp={t.pp} with interleaving" * (groups > 1)
            shown = ", ".join(map(str, failing[:3])) + ", ..." * (len(failing) > 3)
            raise ValueError(f"ramp={shown}: {rule}" + f"; {also} would do" * bool(also))


def parse_ramp(text: str) -> Ramp:
    """The ramp of "START,INCREMENT,SAMPLES", such as "192,16,9765625"; ValueError otherwise."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    ok = len(parts) == 3 and all(map(is_count, parts))
    require(ok, "ramp", text, "must be three whole numbers: START,INCREMENT,SAMPLES")
    start, increment, samples = (int(part) for part in parts)
    return Ramp(start=start, increment=increment, samples=samples)
