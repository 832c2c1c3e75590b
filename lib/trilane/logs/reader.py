"""Reader: blocks of a log in, runs out. Lines of a known form in bulk; every other line that may matter, one by one."""

import re
from collections.abc import Collection

import numpy as np

from trilane.logs import megatron
from trilane.logs.bulk import Bulk, by_iteration, merge
from trilane.logs.draft import Draft
from trilane.logs.fast import Form, Forms, readable
from trilane.logs.lines import Lines

# What makes a line worth a look. No digit stands in it, so all lines of one form are worth it or none.
TELL = re.compile(
    rb"\||iteration|memory|\.\.\. |\.:|\.\.  |MA |step[=:]|steps:|global_step|Samples|per GPU|[\x00\x1b\r]|\{['\"]|"
    rb"rror|rank|Rank|NCCL|nccl|CANCELLED|[Kk]ill|xit|MiB|busbw|throughput|duration|bandwidth|atchdog|imed out|timeout|"
    rb"xception|SIGTERM|[Nn]a[Nn]|world size|padded|Total |LIMIT|FAIL|terminate|Segmentation|Interrupt|failed|"
    rb"out of memory|MEMORY|allocate |arguments|[Ii]nitializing torch|DeepSpeed info|--[a-z]|Num examples|latency|"
    rb"params|Out Of|memory limit|training|^\s*\d+:\s*$|^\s*\d+\s+\d+\s|ignal|batch size|Tera Flops|oad failure"
    rb"|walltime"
)


class Reader:
    """Feed it blocks in order; `close` gives a Draft for each run of the file. `keep` is Table's."""

    def __init__(self, keep: Collection[str] | None = None) -> None:
        self._lines = Lines(keep)
        self._forms = Forms(form)

    def feed(self, block: bytes) -> None:
        """Read whole lines; only the last block of a file may end inside one."""
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        starts, stops = np.concatenate([[0], ends + 1]), np.append(ends, len(block))
        # the bytes after the last line end may be cut off, and no form can tell
        batches, rest = self._forms.batches(block, starts[:-1], stops[:-1])
        steps = merge([b for b in batches if b.form.kind == "iteration"])
        timers = merge([b for b in batches if b.form.kind == "timers"])
        lines, last = self._lines, len(starts) - 1
        for number in [*rest.tolist(), last]:
            line = block[starts[number] : stops[number]]
            if not line or not (lines.waits or TELL.search(line)):
                continue
            steps, timers = self._flush(number, steps, timers, block, starts, stops)
            lines.read(line, whole=number < last)
        self._flush(last + 1, steps, timers, block, starts, stops)

    def close(self) -> list[Draft]:
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
                lines.read(block[starts[number] : stops[number]], whole=True)
                lines.finish()
        return steps, timers


def form(line: bytes) -> Form | None:
    """The form of a line that may be read in bulk; None where it must be read by itself."""
    if not TELL.search(line.rstrip(b"\r")):
        return Form(kind="noise")
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
