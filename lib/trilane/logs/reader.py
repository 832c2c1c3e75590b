"""Reader: blocks of a log in, runs out. Lines of a known form in bulk; every other line that may matter, one by one."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from trilane.logs import megatron
from trilane.logs.fixed_width import Bulk, Form, Forms, by_iteration, merge, readable
from trilane.logs.line_cache import LineCache
from trilane.logs.lines import Lines
from trilane.logs.partial_run import PartialRun
from trilane.logs.prefilter import ALL, MAYBE, STEP


class Reader:
    """Feed it blocks in order; `close` gives a Draft for each run of the file. `keep` and `spill` are Table's."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._lines = Lines(keep, spill)
        self._forms = Forms(form)
        self._dull = LineCache()

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        starts, stops = np.concatenate([[0], ends + 1]), np.append(ends, len(block))
        # the bytes after the last line end may be cut off, and no form can tell
        batches, rest = self._forms.batches(block, starts[:-1], stops[:-1])
        told = self._dull.tells(block, rest)
        new = self._forms.learn(block, starts, stops, rest[told & STEP > 0])
        if new:
            left = ~np.isin(rest, np.concatenate([b.at for b in new]))
            rest, told = rest[left], told[left]
        batches += new
        steps = merge([b for b in batches if b.form.kind == "iteration"])
        timers = merge([b for b in batches if b.form.kind == "timers"])
        lines, last = self._lines, len(starts) - 1
        for number, tell in self._matter([*rest.tolist(), last], np.append(told, np.uint8(ALL))):
            line = block[starts[number] : stops[number]]
            if (tell == MAYBE and not lines.inside) or (line in lines.heard and not lines.waits):
                continue
            if min(steps.first, timers.first) < number:
                steps, timers = self._flush(number, steps, timers, block, starts, stops)
            if not lines.read(line, tell, whole=number < last):
                self._dull.add(line)
        self._flush(last + 1, steps, timers, block, starts, stops)

    def _matter(self, rest: list[int], told: np.ndarray) -> Iterator[tuple[int, int]]:
        """The lines that may say something; while a line before them waits for its rest, all that follow it."""
        hot, tell, at, place = np.flatnonzero(told).tolist(), told.tolist(), 0, 0
        while place < len(hot):
            at = at if self._lines.waits else max(at, hot[place])
            yield rest[at], tell[at]
            at += 1
            while place < len(hot) and hot[place] < at:
                place += 1

    def close(self) -> list[PartialRun]:
        """The runs of the file, those left out of which nothing is known."""
        return self._lines.close()

    def _flush(
        self, before: int, steps: Bulk, timers: Bulk, block: bytes, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[Bulk, Bulk]:
        """Hand on what was read in bulk and stands before the line `before`; what is left."""
        (now, steps), (timed, timers) = steps.split(before), timers.split(before)
        if not len(now.at) and not len(timed.at):
            return steps, timers
        lines = self._lines
        lines.finish()
        first = lines.run.now
        if not len(now.at) or lines.extend(now, block[starts[now.at[-1]] : stops[now.at[-1]]]):
            iterations = np.concatenate([[first], now.values[0] if len(now.at) else []])
            at, values = by_iteration(timed, iterations[np.searchsorted(now.at, timed.at)])
            lines.run.add_timers(timed.names, at, values)
        else:  # the iterations do not simply rise: another run begins, or several ranks print
            for number in np.sort(np.concatenate([now.at, timed.at])).tolist():
                lines.read(block[starts[number] : stops[number]], ALL, whole=True)
                lines.finish()
        return steps, timers


def form(line: bytes) -> Form | None:
    """The form of a line that may be read in bulk; None where it must be read by itself."""
    if any(c in line for c in (b"\x1b", b"\0", b"\r")):
        return None
    # a line that a terminal wrapped behind a bar would look whole, so the field that all of them print must be there
    ends = line.rstrip().endswith(b"|") and b"nan iterations:" in line
    is_step = ends and len(megatron.ITERATION.findall(line)) == 1
    spans = next(megatron.iterations(line)) if is_step else megatron.timers(line)
    kind = "iteration" if is_step else "timers"
    if not spans or (b"time (ms)" in line and is_step) or not all(readable(line[s.start : s.stop]) for s in spans):
        return None
    return Form(kind=kind, spans=spans, dialect=megatron.dialect(line) if is_step else "")
