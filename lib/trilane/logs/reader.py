"""Reader: blocks of a log in, runs out. Lines of a known form are read in bulk, others that may matter one by one."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from trilane.logs.fixed_width import Forms, MergedLines, by_iteration, merge
from trilane.logs.lines import Lines
from trilane.logs.partial_run import PartialRun
from trilane.logs.prefilter import ALL, MAYBE, STEP, LineCache


class Reader:
    """Reads blocks in order; `close` returns a PartialRun for each run. `keep` and `spill` as in NumericTable."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._lines = Lines(keep, spill)
        self._forms, self._cache = Forms(), LineCache()

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        starts, stops = np.concatenate([[0], ends + 1]), np.append(ends, len(block))
        # what follows the last line end may be truncated, which no form shows
        batches, rest = self._forms.batches(block, starts[:-1], stops[:-1])
        kinds = self._cache.kinds(block, rest)
        new = self._forms.learn(block, starts, stops, rest[kinds & STEP > 0])
        if new:
            left = ~np.isin(rest, np.concatenate([b.at for b in new]))
            rest, kinds = rest[left], kinds[left]
        batches += new
        steps = merge([b for b in batches if b.form.kind == "iteration"])
        timers = merge([b for b in batches if b.form.kind == "timers"])
        lines, last = self._lines, len(starts) - 1
        for number, kind in self._relevant([*rest.tolist(), last], np.append(kinds, np.uint8(ALL))):
            line = block[starts[number] : stops[number]]
            if (kind == MAYBE and not lines.facts.inside) or (line in lines.facts.seen and not lines.pending):
                continue
            if min(steps.first, timers.first) < number:
                steps, timers = self._flush(number, steps, timers, block, starts, stops)
            if not lines.read(line, kind, whole=number < last):
                self._cache.add(line)
        self._flush(last + 1, steps, timers, block, starts, stops)

    def _relevant(self, rest: list[int], kinds: np.ndarray) -> Iterator[tuple[int, int]]:
        """Index and kind of the lines that may matter, and of every line while one before it is incomplete."""
        relevant, kind, at, place = np.flatnonzero(kinds).tolist(), kinds.tolist(), 0, 0
        while place < len(relevant):
            at = at if self._lines.pending else max(at, relevant[place])
            yield rest[at], kind[at]
            at += 1
            while place < len(relevant) and relevant[place] < at:
                place += 1

    def close(self) -> list[PartialRun]:
        """The runs of the file that have any content."""
        return self._lines.close()

    def _flush(
        self, before: int, steps: MergedLines, timers: MergedLines, block: bytes, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[MergedLines, MergedLines]:
        """Pass on the bulk lines before the line `before`; returns the rest."""
        (now, steps), (timed, timers) = steps.split(before), timers.split(before)
        if not len(now.at) and not len(timed.at):
            return steps, timers
        lines = self._lines
        lines.finish()
        first = lines.run.iteration
        if not len(now.at) or lines.extend(now, block[starts[now.at[-1]] : stops[now.at[-1]]]):
            iterations = np.concatenate([[first], now.values[0] if len(now.at) else []])
            at, values = by_iteration(timed, iterations[np.searchsorted(now.at, timed.at)])
            lines.run.add_timers(timed.names, at, values)
        else:  # the iterations do not simply increase: another run begins, or several ranks print
            for number in np.sort(np.concatenate([now.at, timed.at])).tolist():
                lines.read(block[starts[number] : stops[number]], ALL, whole=True)
                lines.finish()
        return steps, timers
