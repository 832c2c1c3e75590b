"""What to do about a log that no dialect reads: its lines that look most like iterations, and a table to begin with."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trilane.logs.dialects.dialect import COLUMNS, UNITS, Dialect
from trilane.logs.dialects.tables import dialect_of
from trilane.logs.dialects.trainers import ESCAPE
from trilane.logs.reading.reader import blocks
from trilane.utils.tables import printable
from trilane.utils.validation import shown

MOST_BYTES = 1 << 24  # of the log that are searched
MOST_FORMS = 10_000  # of lines that are compared
LONGEST = 2000  # bytes of a line
SHOWN, WIDTH = 3, 160  # lines, and characters of each
ENOUGH = 4.0  # of the score of a line that is shown
RISES = 0.9  # of the lines of a form, from one to the next, in which the iteration's number must rise
NUMBER = re.compile(rb"\d[\d.,]*(?:[eE][-+]?\d+)?")
# no part of a date, a time, a share or a decimal number, nor the total after the number of an iteration
COUNT = re.compile(rb"(?<![\w.])(?<!\d[:/,-])\d{1,15}(?![:,.-]\d|[\w%]|/\d+/)")
OF_TOTAL = re.compile(rb"\s?(?:/|of)\s{0,9}\d")
STEP, LOSS = (
    re.compile(rb"(?i)step|iter|update|batch|\bitr?\b(?!/s)"),
    re.compile(rb"(?i)loss(?![ _]?scal)|nll|\bce\b|xent|entropy|perplexity|ppl"),
)
HELD_OUT = re.compile(rb"(?i)(?:eval|valid|\bval\b|\btest)[^\d=]{0,30}=?\s*$")  # before the number of an iteration
NAMED = re.compile(r"([A-Za-z][\w/-]{0,30})['\"]?(?:\s{0,3}[:=]|(?=\s))\s{0,3}['\"]?(?=[-+]?\d)")
NEAR, WORD = 24, r"[^\d\s]\D{2,}[^\d\s]"  # characters before the iteration's number that its pattern has; a word of it
GUESSES = {
    r"loss|nll|xent|cross_entropy|ce": "lm_loss",
    r"lr|learning_rate": "learning_rate",
    r"grad_?norm|gnorm": "grad_norm",
}


@dataclass
class Form:
    """Lines that differ in their numbers only: how many, the first one with its `number`, that of the `last`, and how
    often each of its counts rose."""

    number: int
    text: bytes
    counts: list[int]
    lines: int = 1
    rises: list[int] = field(default_factory=list)
    last: int = 0

    def add(self, counts: list[int], number: int) -> None:
        """Compare the counts of one more line with those of the last."""
        self.lines, self.last = self.lines + 1, number
        self.rises = self.rises or [0] * len(self.counts)
        for place, (before, now) in enumerate(zip(self.counts, counts, strict=False)):
            self.rises[place] += now > before
        self.counts = counts if len(counts) == len(self.counts) else self.counts

    @property
    def place(self) -> int | None:
        """Which count is the iteration's: of those that rise, the first after a word for it, or before a total."""
        rising = [i for i, rises in enumerate(self.rises) if self.lines > 2 and rises >= RISES * (self.lines - 1)]
        found = list(COUNT.finditer(self.text))
        named = [i for i in rising if _is_named(self.text, found[i])]
        total = [i for i in rising if OF_TOTAL.match(self.text, found[i].end())]
        return next(iter([*named, *total, *rising]), None)

    @property
    def is_named(self) -> bool:
        """Whether the iteration's number stands behind a word for it."""
        return self.place is not None and _is_named(self.text, list(COUNT.finditer(self.text))[self.place])

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
        return not HELD_OUT.search(self.text[: list(COUNT.finditer(self.text))[self.place].start()])

    @property
    def score(self) -> float:
        """How much the lines look like iterations."""
        words = 2.0 * bool(STEP.search(self.text)) + 2.0 * bool(LOSS.search(self.text))
        return words + 3.0 * (self.place is not None) + min(2.0, math.log10(self.lines))


def _is_named(text: bytes, count: re.Match[bytes]) -> bool:
    return bool(STEP.search(text[max(0, count.start() - 16) : count.start()]))


def forms(path: Path, most_bytes: int = MOST_BYTES) -> list[Form]:
    """The forms of lines that look most like iterations, of those in the first bytes, the likeliest first."""
    found = dict[bytes, Form]()
    for number, line in _lines(path, most_bytes):
        if len(line) < LONGEST and (counts := COUNT.findall(line)):
            key = b" ".join(NUMBER.sub(b"0", line).split())
            if form := found.get(key):
                form.add([int(count) for count in counts], number)
            elif len(found) < MOST_FORMS:
                found[key] = Form(number, line, [int(count) for count in counts])
    likely = sorted(found.values(), key=lambda form: (-form.score, form.number))
    return [form for form in likely[:SHOWN] if form.score >= ENOUGH]


def draft(form: Form) -> str:
    """A table, as JSON, that reads lines of the form as far as the names of their numbers show; "" if there is none."""
    if form.place is None:
        return ""
    at = list(COUNT.finditer(form.text))[form.place]
    before = NUMBER.split(form.text[: at.start()])[-1].decode("utf-8", "replace")[-NEAR:]
    after = form.text[at.end() :].decode("utf-8", "replace")
    pattern = _escaped(before) + r"(?P<iteration>\d+)"
    if not re.search(r"[^\d\s]{4}", before) and (word := re.search(WORD, after)):  # every pattern needs a word
        pattern += f".{{0,{2 * word.end() + NEAR}}}?" + re.escape(word[0]).replace("\\ ", " ")
    names = dict.fromkeys(NAMED.findall(form.text.decode("utf-8", "replace")))
    fields = {
        n: column
        for n in names
        for guess, column in GUESSES.items()
        if re.fullmatch(f"(?i)(?:train[_/])?(?:{guess})", n)
    }
    table = {"name": "mine", "iteration": [pattern], "fields": fields}
    try:
        dialect: Dialect = dialect_of(table)
    except ValueError:
        return ""
    return json.dumps(table) if dialect.iterations(form.text) else ""


def advice(path: Path) -> str:
    """The lines of the log that look most like iterations, and how to name them, in lines of text; "" for none."""
    likely = forms(path)
    if not likely:
        return ""
    text = ["  these lines look most like iterations:"]
    text += [f"    {form.number}: {shown(form.text.decode('utf-8', 'replace').strip(), WIDTH)}" for form in likely]
    if table := next(filter(None, map(draft, likely)), ""):
        text += ["  where that is so, name the other numbers in a table, beginning with this one:", f"    {table}"]
        text += [f"  columns: {', '.join(sorted(COLUMNS))}", f"  units: {', '.join(filter(None, UNITS))}"]
        text += [f"  and read the log with it: trilane logs parse {path} --dialect mine.json"]
    return "\n".join(map(printable, text))


def _lines(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Number and text of the lines of the log's beginning; a bar's states are lines of one number."""
    number = size = 0
    for block in blocks(path):
        for line in block[: most_bytes - size].split(b"\n"):
            number += 1
            text = ESCAPE.sub(b"", line) if b"\x1b" in line else line
            yield from ((number, part) for part in text.split(b"\r") if part.strip())
        number -= 1  # a block ends after a line end
        if (size := size + len(block)) >= most_bytes:
            return


def _escaped(text: str) -> str:
    """Pattern of the text, in which blanks may vary."""
    return re.sub(r"(?:\\\s|\s)+", r"\\s+", re.escape(text))
