"""Lines: assigns each line that may matter to its run, and finds where one run ends and the next begins."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from trilane.logs.dialects import megatron, trainers
from trilane.logs.reading import run_facts
from trilane.logs.reading.copies import REPORTERS, TOLERANCE
from trilane.logs.reading.forms import Form
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.prefilter import ARGUMENT, END, NUMBER, STEP, TABLE
from trilane.logs.reading.sorted_lines import MergedLines, times
from trilane.logs.reading.table_lines import DIGITS, MEMORY, TableLines
from trilane.logs.reading.trainer_dicts import TrainerDicts, settle_numbers
from trilane.logs.table import NAN
from trilane.utils.validation import require

# an iteration line begins; it may end on a later line
WRAPPED = re.compile(rb"iteration\s+\d+\s*/(?:[\s\d]*|infinity\s*)(?:\||$)")
OTHER = re.compile(rb"^\s*(?:\[|time \(ms\)|\(min, max\)|-{4}|\+|validation |after \d+ iter|Effective |\{)")
DEEPSPEED = re.compile(rb"Samples|step=|steps:")
MAX_PIECES = 12  # of a wrapped iteration line
MAX_LENGTH = 1 << 16  # bytes: longer lines are searched for iterations only
MAX_RUNS = 10_000  # of a file


class Lines:
    """The runs of a file so far, and an iteration line that may continue on the next line."""

    def __init__(self, keep: Collection[str] | None = None, spill: Path | None = None) -> None:
        self._keep, self._spill = keep, spill
        self.runs = [PartialRun(keep, spill)]
        self._begun, self._begun_at, self._pieces = b"", 0, 0
        self.tables, self.dicts = TableLines(self), TrainerDicts(self)
        self._launches = set[bytes]()  # lines of the current run's launch, every digit as 0
        self.number = 0  # of the current line in the file
        self.facts = run_facts.RunFacts()

    @property
    def run(self) -> PartialRun:
        """The current run."""
        return self.runs[-1]

    @property
    def pending(self) -> bool:
        """Whether the next line matters whatever it holds, as it may complete the line before it."""
        return bool(self._begun or self.dicts.pending or self.tables.block or self.facts.traceback)

    @property
    def in_block(self) -> bool:
        """Whether an iteration of several lines is all that the next line may continue."""
        return bool(self.tables.block) and not (self.dicts.pending or self.facts.inside or self.facts.traceback)

    def close(self) -> list[PartialRun]:
        """All runs that have any content."""
        self.finish()
        self._settle()
        self.facts.close(self.run)
        for run in self.runs:
            settle_numbers(run)
        return [run for run in self.runs if run.has_content]

    def read(self, line: bytes, kind: int, whole: bool) -> bool:
        """Read one line of that kind (see prefilter.line_kinds), not `whole` if the file ends inside it.

        Returns whether it has the form of a line that matters; if not, no line does that differs in digits only.
        """
        if b"\x1b" in line or b"\0" in line:
            line = trainers.ESCAPE.sub(b"", line).replace(b"\0", b"")
        line = line.rstrip(b"\r\n")
        if trainers.has_parts(line):  # a progress bar that overwrites itself, or dicts of many lines
            *parts, last = trainers.bar_parts(line)
            return any([*(self._read(part, kind, True) for part in parts), self._read(last, kind, whole)])
        return self._read(line, kind, whole)

    def _read(self, line: bytes, kind: int, whole: bool) -> bool:
        """Read a line, or a part of one that a bar overwrote."""
        if self.dicts.pending and b"{'" not in line and megatron.body(line).strip():
            self.dicts.release(line)
        if self._begun and self._continues(line):
            return True
        in_block = self.in_block
        if self.tables.block and self.tables.continues(line):
            return True
        if in_block and not kind:
            return False
        if kind & TABLE and b"elapsed time per iteration" not in line and self.tables.read(line, whole):
            return True
        if b"iteration" in line and WRAPPED.search(line):
            self._begun, self._begun_at, self._pieces = line, self.number, 1
            if not whole or len(line) >= MAX_LENGTH or (line.rstrip().endswith(b"|") and b"nan iterations:" in line):
                self.finish(whole)
            return True
        if len(line) >= MAX_LENGTH:
            return True
        if matched := self.facts.is_launch(line):
            self.launch(line)
        if kind & (NUMBER | STEP):
            matched |= self._numbers(line)
        if kind & TABLE and not self.dicts.pending:
            matched |= self.tables.fallback(line, whole) or self.tables.digits_decide(line)
        if kind & ARGUMENT or self.facts.inside:
            matched |= self.facts.arguments(line, self.run)
        if kind & END or self.facts.traceback:
            matched |= self.facts.end(line, self.run)
        return matched

    def _continues(self, line: bytes) -> bool:
        """Whether `line` continues the iteration line that was begun; wrapping may or may not have removed a blank."""
        if self._pieces < MAX_PIECES and not WRAPPED.search(line) and not OTHER.match(line):
            begun = self._begun
            joined = max((begun + line, begun.rstrip() + b" " + line.strip()), key=_complete_fields)
            if _complete_fields(joined) > _complete_fields(begun):
                self._begun, self._pieces = joined, self._pieces + 1
                return True
        self.finish()
        return False

    def finish(self, whole: bool = True) -> None:
        """Read the iteration line that was begun as far as it goes, and the pending dict of the Trainer."""
        self.dicts.release()
        self.tables.end_block()
        line, self._begun = self._begun, b""
        dialect = megatron.dialect(line) if line else ""
        for spans in megatron.iterations(line, whole):
            row = {span.column: span.value(line) for span in spans}
            if whole or "sec_per_it" in row:
                self.step(row, dialect, row.pop("_source", NAN), line, self._begun_at)

    def step(self, row: dict[str, float], dialect: str, rank: float, line: bytes, number: int) -> None:
        """Add an iteration: the next of the run, another rank's copy, or the first of another run."""
        self.tables.settle(dialect)
        others = {name for name in self.run.dialects if name != "deepspeed"}
        dialect = dialect or next(iter(others & megatron.FAMILY), "megatron-2021" if "lm_loss" in row else "unknown")
        takes = self.run.accepts(row, rank)
        counts = {name for name in others if self.run.dialects[name]}
        if counts and dialect not in counts and not others | {dialect} <= megatron.FAMILY:
            # another reporter of the same run, such as a bar, repeats the number of the iteration
            takes = None if self.run.iterations.last("iteration") == row["iteration"] else False
        if takes is False:
            self.begin()
            takes = True
        if takes:
            self._split_after_end()
            self.run.add(row, dialect, rank, line)
            self.run.saw(row["iteration"], line, number, self.run.rows)
            return
        self.run.copies.compare(row, self.run.iterations, TOLERANCE if dialect in counts else REPORTERS)
        if dialect not in megatron.FAMILY:
            self.run.dialects[dialect] += 0
            self.run.complete(row)

    def launch(self, line: bytes) -> None:
        """Read a line of a launch: of another run where the current one has begun, or has failed and repeats it."""
        form = line.translate(DIGITS)
        self.begin(again=bool(self.run.endings) and form in self._launches)
        self._launches.add(form)
        self.run.launched = True

    def begin(self, again: bool = False) -> None:
        """Begin another run, unless the current one has nothing yet; `again`: its launch failed."""
        if again or self.run.ends_at_launch:
            require(len(self.runs) < MAX_RUNS, "log", f"{len(self.runs)} runs", "its iterations do not rise")
            self._settle()
            self.runs.append(PartialRun(self._keep, self._spill, follows=True))
            self._launches.clear()

    def _split_after_end(self) -> None:
        """Collect iterations after the scheduler's end in a run of their own, until it is clear whose they are."""
        if self.run.ended_by_scheduler:
            self._settle()
            before = self.run
            self.runs.append(PartialRun(self._keep, self._spill, follows=True))
            self.run.previous = before

    def _settle(self) -> None:
        """Return the lines of the last run to the previous one, if they may be its delayed output."""
        if (before := self.run.previous) and self.run.may_be_delayed:
            before.absorb(self.runs.pop())

    def extend(self, steps: MergedLines, part: slice, form: Form, seen: Sequence[tuple[int, bytes, int]]) -> bool:
        """Add iterations of one form's dialect in bulk if they simply continue the run, else return False; `seen`: the
        place among them, the line and its number in the file of the first, some others, and the last."""
        run, values = self.run, {name: steps.values[i, part] for i, name in enumerate(steps.names)}
        number, sources = values["iteration"], values.pop("_source", np.array([NAN]))
        source, first = float(sources[0]), not run.iterations.rows
        rises = first or number[0] > run.iterations.last("iteration")
        one = bool((sources == source).all()) if source == source else bool((sources != sources).all())
        known = first or (run.rank != run.rank and source != source) or run.rank == source
        dialects = {name for name in run.dialects if name != "deepspeed"} | {form.dialect}
        if not (rises and one and known and len(dialects) == 1):
            return False
        self._split_after_end()
        if form.first_iteration is not None:
            values["sec_per_it"] = self.run.timed_rows(values, times(steps, part), form.dialect)
            self.run.first_iteration = form.first_iteration
        # of lines of several forms in a block a column may be another form's
        names = [name for name in values if name[0] != "_" and not np.isnan(values[name]).all()]
        self.run.extend(names, np.array([values[name] for name in names]), form.dialect, source, seen[-1][1])
        if form.first_iteration is not None:
            self.run.add_memories({n: values[n] for n in MEMORY if n in values}, megatron.rank(seen[-1][1]), number[0])
        before = self.run.iterations.rows - len(number)
        for place, line, at in seen:
            self.run.saw(float(number[place]), line, at, before + place + 1)
        return True

    def _numbers(self, line: bytes) -> bool:
        """Read all numbers but Megatron's iterations; returns whether the line has the form of any."""
        rank, matched = megatron.rank(line), True
        if b"{'" in line:
            self.dicts.read(line)
        elif b'{"' in line and b'"sec_per_it"' in line:
            if row := trainers.trilane_step(line):
                self.step(row, "trilane", megatron.source(line), line, self.number)
                if timers := trainers.trilane_timers(line):
                    values = np.array([[value] for value in timers.values()])
                    self.run.add_timers(list(timers), np.array([self.run.iteration]), values)
        elif (b"it/s" in line or b"s/it" in line) and (bar := trainers.bar(line)):
            self.dicts.bar = bar
        else:
            matched = bool(DEEPSPEED.search(line))
        for spans in trainers.deepspeed_spans(line) if DEEPSPEED.search(line) else ():  # also behind a bar
            self.deepspeed({s.column: s.value(line) for s in spans if s.column not in MEMORY}, line)
        return self.facts.numbers(line, rank, self.run) or matched

    def deepspeed(self, row: dict[str, float], line: bytes) -> None:
        """Read a step of DeepSpeed's, which counts where nothing else numbers the iterations; step 0 is no step."""
        if row.get("iteration") == 0:
            return
        self.tables.settle("deepspeed")
        if self.run.restarts(row):
            self.begin()
        self.run.add_companion(row, trainers.timestamp(line), line)
        if not self.run.iterations.rows:
            self.run.saw(self.run.iteration, line, self.number, self.run.rows)


def _complete_fields(line: bytes) -> int:
    """How many fields of an iteration line are complete."""
    return sum(len(spans) for spans in megatron.iterations(line, whole=False))
