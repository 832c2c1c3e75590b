"""Lines: each line that may matter goes to the run it belongs to; where one run ends and the next begins."""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from trilane.logs import deepspeed, megatron, run_facts, timestamps, trainers
from trilane.logs.fixed_width import Bulk
from trilane.logs.partial_run import PartialRun
from trilane.logs.prefilter import ARGUMENT, END, NUMBER, STEP
from trilane.logs.table import NAN

WRAPPED = re.compile(
    rb"iteration\s+\d+\s*/(?:[\s\d]*|infinity\s*)(?:\||$)"
)  # an iteration line begins, and may end in a later line

OTHER = re.compile(rb"^\s*(?:\[|time \(ms\)|\(min, max\)|-{4}|\+|validation |after \d+ iter|Effective |\{)")
MOST_PIECES = 12  # lines that one wrapped iteration line may take
LONG = 1 << 16  # bytes: in a longer line only iterations are looked for
OTHERS = {"hf-trainer", "torchtitan", "trilane"}  # the rest are Megatron's relatives


class Lines:
    """The runs of a file so far, and an iteration line that may go on in the next line."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._keep, self._spill = keep, spill
        self.runs = [PartialRun(keep, spill)]
        self._begun, self._pieces = b"", 0
        self._held, self._dict = dict[str, float](), b""  # the Trainer's, whose bar may stand on a line behind it
        self._bar: dict[str, float] = {}  # the last that stood on a line of its own
        self._facts = run_facts.Facts()

    @property
    def run(self) -> PartialRun:
        """The run that lines belong to now."""
        return self.runs[-1]

    @property
    def waits(self) -> bool:
        """Whether even a line without a word of ours matters: the rest of what was begun."""
        return bool(self._begun or self._held or self._facts.frames)

    def close(self) -> list[PartialRun]:
        """All runs of which something is known."""
        self.finish()
        self._settle()
        return [run for run in self.runs if run.says_something]

    @property
    def inside(self) -> bool:
        """Whether a dump of arguments is open, where names may stand without dots."""
        return self._facts.inside

    @property
    def heard(self) -> set[bytes]:
        """Lines that would change nothing if they came again, as long as nothing else begins."""
        return self._facts.heard

    def read(self, line: bytes, tell: int, whole: bool) -> bool:
        """Take one line that may say what `tell` tells (see tells.py); not `whole` where the file ends inside it.

        Whether it has the form of a line that says something; if not, no line does that differs in digits only.
        """
        if b"\x1b" in line or b"\0" in line:
            line = trainers.ESCAPE.sub(b"", line).replace(b"\0", b"")
        line = line.rstrip(b"\r\n")
        if b"\r" in line:  # a progress bar that writes over itself
            return any([self.read(part, tell, whole) for part in trainers.bar_parts(line)])
        if self._held and line.strip() and b"{'" not in line:
            self._release(line)
        if self._begun and self._goes_on(line):
            return True
        if b"iteration" in line and WRAPPED.search(line):
            self._begun, self._pieces = line, 1
            if not whole or (line.rstrip().endswith(b"|") and b"nan iterations:" in line):
                self.finish(whole)
            return True
        if len(line) >= LONG:
            return True
        told = self._facts.is_launch(line)
        if told:
            self.begin()
        if tell & (NUMBER | STEP):
            told |= self._numbers(line)
        if tell & ARGUMENT or self._facts.inside:
            told |= self._facts.arguments(line, self.run)
        if tell & END or self._facts.frames:
            told |= self._facts.end(line, self.run)
        return told

    def _goes_on(self, line: bytes) -> bool:
        """Whether `line` is the rest of the iteration line that was begun; a wrap may have eaten a blank or not."""
        if self._pieces < MOST_PIECES and not WRAPPED.search(line) and not OTHER.match(line):
            begun = self._begun
            joined = max((begun + line, begun.rstrip() + b" " + line.strip()), key=_told)
            if _told(joined) > _told(begun):
                self._begun, self._pieces = joined, self._pieces + 1
                return True
        self.finish()
        return False

    def finish(self, whole: bool = True) -> None:
        """Read the iteration line that was begun as it stands, and what was held."""
        self._release()
        line, self._begun = self._begun, b""
        for spans in megatron.iterations(line, whole):
            row = {span.column: span.value(line) for span in spans}
            if whole or "sec_per_it" in row:
                self._step(row, megatron.dialect(line), row.pop("_rank", NAN), line)

    def _step(self, row: dict[str, float], dialect: str, rank: float, line: bytes) -> None:
        """One iteration: the run's next, or another rank's copy, or the first of another run."""
        others = {name for name in self.run.dialects if name != "deepspeed"}
        takes = self.run.accepts(row, rank)
        if takes is False or (others and dialect not in others and OTHERS & (others | {dialect})):
            self.begin()
            takes = True
        if takes:
            self._follow()
            self.run.add(row, dialect, rank, line)
        elif dialect == "torchtitan":
            self.run.complete(row)

    def begin(self) -> None:
        """Another run, unless nothing happened yet in this one."""
        if self.run.is_over:
            self._settle()
            self.runs.append(PartialRun(self._keep, self._spill))
            self._facts.heard.clear()

    def _follow(self) -> None:
        """Iterations after the scheduler ended the run go into a run of their own, until it is known whose they are."""
        if self.run.is_ended:
            self._settle()
            before = self.run
            self.runs.append(PartialRun(self._keep, self._spill))
            self.run.follows = before

    def _settle(self) -> None:
        """Give the last run's lines to the run that they follow, if there is one and they are few."""
        if (before := self.run.follows) and self.run.is_late:
            before.take_back(self.runs.pop())

    def extend(self, steps: Bulk, line: bytes) -> bool:
        """Take iterations in bulk, if they simply go on; else False, and nothing was taken. `line` is the last one."""
        run, number = self.run, steps.values[0]
        ranks = steps.values[steps.names.index("_rank")] if "_rank" in steps.names else np.array([NAN])
        rises = not run.iterations.rows or number[0] > run.iterations.last("iteration")
        same_rank = len(ranks) == 1 or (bool((ranks == ranks[0]).all()) and ranks[0] == ranks[0])
        known = not run.iterations.rows or (run.rank != run.rank and ranks[0] != ranks[0]) or run.rank == ranks[0]
        others = {name for name in run.dialects if name != "deepspeed"} | set(steps.dialects)
        if not (rises and same_rank and known and len(others) == 1 and (np.diff(number) > 0).all()):
            return False
        keep = [i for i, name in enumerate(steps.names) if name != "_rank"]
        names = [steps.names[i] for i in keep]
        self._follow()
        self.run.extend(names, steps.values[keep], steps.dialects[0], float(ranks[0]), line)
        return True

    def _numbers(self, line: bytes) -> bool:
        """Every kind of number but Megatron's iterations; whether the line has the form of one."""
        prefix = megatron.PREFIX.match(line)
        rank = float(prefix[prefix.lastindex or 0]) if prefix else NAN
        told = True
        if b"step:" in line and (row := trainers.titan(line)):
            known = {"rank": 0.0 if rank != rank else rank, "max_reserved": row["max_reserved"]}
            self._step(self.run.timed(row, timestamps.read(line), "torchtitan"), "torchtitan", rank, line)
            self.run.add_memory(known)
        elif b"{'" in line:
            self._hf(line)
        elif line.lstrip().startswith(b'{"'):
            if row := trainers.our_step(line):
                self._step(row, "trilane", NAN, line)
            if timers := trainers.our_timers(line):
                self.run.add_timers(list(timers), np.array([self.run.now]), np.array([[v] for v in timers.values()]))
        elif (b"it/s" in line or b"s/it" in line) and (bar := trainers.bar(line)):
            self._bar = bar
        elif b"Samples" in line or b"step=" in line or b"steps:" in line:
            for row in deepspeed.steps(line):
                if not self.run.iterations.rows and row["iteration"] < self.run.now:
                    self.begin()
                self.run.add_companion(self.run.timed(row, timestamps.read(line), "deepspeed"), line)
        else:
            told = False
        return self._facts.numbers(line, rank, self.run) or told

    def _hf(self, line: bytes) -> None:
        for values in trainers.hf_dicts(line):
            if "train_runtime" in values:
                self._release()
                self.run.dialects["hf-trainer"] += 0
                self.run.summary = self.run.summary or values
                self.run.last_line = line
            elif values != self._held:
                self._release()
                self._held, self._dict = values, line
                if "step" in values:
                    self._release()

    def _release(self, line: bytes = b"") -> None:
        """Read the dict that was held, with the step of the training's bar: the one before it, else that on `line`."""
        if values := self._held:
            self._held, run = {}, self.run
            behind, total = trainers.bar(line), run.iterations.last("train_iters")
            total = behind.get("total", NAN) if total != total else total
            if "step" not in values:
                bars = [b for b in (self._bar, behind) if b and b["total"] == total and b["step"] > run.now]
                values = values | next(iter(bars), {})
            told = {name: column for name, column in trainers.HF.items() if name in values}
            if run.iterations.rows and all(values[n] == run.iterations.last(column) for n, column in told.items()):
                return  # another node prints the same; epochs alone are rounded, and equal for many steps
            every = run.arguments.get("logging_steps")
            row = trainers.hf_iteration(values, run.now, every if isinstance(every, int) else 1)
            self._step(run.timed(row, values.get("elapsed", NAN), "hf-trainer"), "hf-trainer", NAN, self._dict)


def _told(line: bytes) -> int:
    """How many fields are told whole."""
    return sum(len(spans) for spans in megatron.iterations(line, whole=False))
