"""Lines of a log that look like iterations: a refusal shows the likeliest, and a problem those that were not read."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from trilane.logs.reading.blocks import blocks
from trilane.logs.reading.reader import ESCAPE
from trilane.utils.tables import printable
from trilane.utils.validation import shown

# no part of a date, a time, a share or a decimal number, nor the total after the number of an iteration
COUNT = re.compile(rb"(?<![\w.])(?<!\d[:/,-])\d{1,15}(?![:,.-]\d|[\w%]|/\d+/)")
STEP = re.compile(rb"(?i)step|iter|update|batch|\bitr?\b(?!/s)")
LOSS = re.compile(rb"(?i)loss(?![ _]?scal)|nll|\bce\b|xent|entropy|perplexity|ppl")


@dataclass
class Form:
    """Lines that differ in their numbers only: how many, the first one with its `number`, that of the `last`, the
    counts in it, and how often each of them rose."""

    number: int
    text: bytes
    counts: list[int]
    lines: int = 1
    rises: list[int] = field(default_factory=list)
    last: int = 0

    def add(self, counts: list[int], number: int) -> None:
        """Compare the counts of one more line with those of the last."""
        self.lines, self.last, self.rises = self.lines + 1, number, self.rises or [0] * len(self.counts)
        for place, (before, now) in enumerate(zip(self.counts, counts, strict=False)):
            self.rises[place] += now > before
        self.counts = counts if len(counts) == len(self.counts) else self.counts

    @property
    def place(self) -> int | None:
        """Which count is the iteration's: of those that rise in nine of ten lines the first after a word for it."""
        rising = [i for i, rises in enumerate(self.rises) if self.lines > 2 and rises >= 0.9 * (self.lines - 1)]
        return next(iter([*filter(self._is_named, rising), *rising]), None)

    def _is_named(self, place: int) -> bool:
        at = [found.start() for found in COUNT.finditer(self.text)][place]
        return bool(STEP.search(self.text[max(0, at - 16) : at]))

    @property
    def is_named(self) -> bool:
        """Whether the iteration's number stands behind a word for it."""
        return self.place is not None and self._is_named(self.place)

    @property
    def iterations(self) -> tuple[int, int]:
        """The first and the last iteration's number, where `place` is known."""
        assert self.place is not None
        return int(COUNT.findall(self.text)[self.place]), self.counts[self.place]

    @property
    def is_sure(self) -> bool:
        """Whether the lines have a word for an iteration, its number that rises, and a word for a loss in training."""
        if self.place is None or not (STEP.search(self.text) and LOSS.search(self.text)):
            return False
        before = self.text[: [found.start() for found in COUNT.finditer(self.text)][self.place]]
        return not re.search(rb"(?i)(?:eval|valid|\bval\b|\btest)[^\d=]{0,30}=?\s*$", before)

    @property
    def score(self) -> float:
        """How much the lines look like iterations."""
        return 2.0 * bool(STEP.search(self.text)) + 2.0 * bool(LOSS.search(self.text)) + 3.0 * (self.place is not None)


def forms(path: Path, most_bytes: int = 1 << 24) -> list[Form]:
    """The three forms of lines that look most like iterations, of those in the first bytes, the likeliest first."""
    found, number, size = dict[bytes, Form](), 0, 0
    for block in blocks(path):
        for number, line in enumerate(block[: most_bytes - size].splitlines(), number + 1):  # noqa: B020
            counts = [int(count) for count in COUNT.findall(line)] if len(line) < 2000 else []
            key = b" ".join(re.sub(rb"\d[\d.,]*(?:[eE][-+]?\d+)?", b"0", line).split()) if counts else b""
            if key in found:
                found[key].add(counts, number)
            elif counts and len(found) < 10_000:
                found[key] = Form(number, ESCAPE.sub(b"", line), counts)
        if (size := size + len(block)) >= most_bytes:
            break
    likely = sorted(found.values(), key=lambda form: (-form.score, -min(form.lines, 100), form.number))
    return [form for form in likely[:3] if form.score >= 4]


def advice(path: Path) -> str:
    """The lines of the log that look most like iterations, and where it stands how to read them; "" for none."""
    text = [f"    {form.number}: {shown(form.text.decode('utf-8', 'replace').strip(), 160)}" for form in forms(path)]
    guide = "docs/guides/my-logs.md shows how a table of your own reads them"
    return "\n".join(map(printable, ["  these lines look most like iterations:", *text, f"  {guide}"])) if text else ""
