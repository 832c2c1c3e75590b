"""Dialect: how one trainer prints an iteration; its patterns give a line's numbers as *spans* (see megatron)."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trilane.logs.dialects.megatron import PREFIX, Span
from trilane.utils.validation import require

COLUMNS = {
    "iteration",
    "train_iters",
    "epoch",
    "epochs_done",
    "nth_epoch",
    "time_s",
    "sec_per_it",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "consumed_samples",
    "consumed_tokens",
    "global_batch_size",
    "seq_length",
    "samples_per_second",
    "mfu",
    "skipped",
    "tokens_per_second",
    "tokens_per_gpu_per_second",
    "flops_per_s_per_gpu",
    "allocated",
    "max_allocated",
    "nan",
    "reserved",
    "max_reserved",
    "memory_share",
    "num_zeros",
    "params_norm",
    "iterations_per_second",
}
UNITS = {  # multiplier and divisor to seconds, bytes, nats or a share; / 1e3 rounds once where x 1e-3 does not
    **{"": (1.0, 1.0), "s": (1.0, 1.0), "ms": (1.0, 1e3), "us": (1.0, 1e6), "%": (1.0, 100.0)},
    **{"min": (60.0, 1.0), "h": (3600.0, 1.0), "d": (86400.0, 1.0), "bits": (math.log(2), 1.0)},
    **{"K": (1e3, 1.0), "M": (1e6, 1.0), "G": (1e9, 1.0), "T": (1e12, 1.0)},
    **{"MB": (1e6, 1.0), "GB": (1e9, 1.0), "MiB": (2.0**20, 1.0), "GiB": (2.0**30, 1.0)},
}
PRINTED = re.compile(rb"\s?(ms|us|min|s)(?:ec(?:ond)?s?)?\b")  # a unit after its number
UNITS["printed"] = (0.0, 1.0)  # the one after the number, without which the number is left out
GROUP_UNITS = {"percent": "%"}  # a group's name holds no %
SUFFIXES = {b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15}
NUMBER = rb"[-+]?(?:\d[\d,]*+(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|[-+]?(?i:nan|inf(?:inity)?)\b"
FIELD = (
    rb"(?<![\w/.-])['\"]?(%s)['\"]?(?:\s{0,40}[:=]|(?=\s))\s{0,40}['\"]?(?:[A-Za-z][\w.]{0,19}\()?("
    + NUMBER
    + rb")([KMGBTP](?![A-Za-z]))?(?![\d.]|:\d|[eE][-+]?(?:\W|$))"
)
QUALIFIER = re.compile(rb"(?<![A-Za-z0-9.])([A-Za-z][A-Za-z_/-]{0,30}) $")  # a word that belongs to the name after it
PLAIN = {*b"info warning debug with and its the is train training step batch current mean lm".split()}  # means no other
MAX_LINE = 1 << 13  # bytes: patterns may take time that grows with the square of a line's length
EPOCHS = {"epochs_done": 0.0, "nth_epoch": 1.0}  # where iterations count in their epoch: the number of the first one
RATE_DIGITS = 3  # of iterations per second, below which they are too rounded to give seconds
DIGITS = re.compile(rb"\d+")
MAX_LEAD = 300  # bytes before an indented line
MAX_BLOCK = 200  # lines after the first one of a block


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one trainer prints its iterations; see docs/guides/my-logs.md for the keys of its file.

    `fields` gives column, multiplier and divisor for a number's printed name; one of `words` stands in every line that
    matters. A line without the columns `needs` is no iteration. A `fallback` reads what nothing else reads of a run.
    """

    name: str
    source: str = ""
    iteration: tuple[re.Pattern[bytes], ...]
    fields: Mapping[bytes, tuple[str, float, float]] = field(default_factory=dict)
    validation: tuple[re.Pattern[bytes], ...] = ()
    launch: tuple[re.Pattern[bytes], ...] = ()
    end: tuple[re.Pattern[bytes], ...] = ()
    lines: str = ""
    first_iteration: int = 1
    needs: frozenset[str] = frozenset()
    fallback: bool = False
    words: tuple[bytes, ...] = ()

    @functools.cached_property
    def _field(self) -> re.Pattern[bytes] | None:
        names = [re.escape(name) for name in sorted(self.fields, key=len, reverse=True)]
        return re.compile(FIELD % b"|".join(names)) if names else None

    def iterations(self, line: bytes) -> list[Span]:
        """The numbers of an iteration line, its number first; [] for any other line."""
        found = _first(self.iteration, line)
        if not found or (self.lines == "json" and not line.rstrip().endswith(b"}")):
            return []
        spans = _groups(*found)
        spans += self.rest(line, {span.column for span in spans})
        return spans if self.needs <= {span.column for span in spans} else []

    def parts(self, line: bytes) -> list[bytes]:
        """The line, cut before each further iteration, which has a higher number: the end of a line was lost there."""
        found = None if self.lines or self.fallback else _first(self.iteration, line)
        if not found:
            return [line]
        (match, start), cuts = found, [0]
        while (after := match.re.search(line[start:], match.end("iteration"))) and _number(after) > _number(match):
            cuts, match = [*cuts, start + after.start()], after
        return [line[low:high] for low, high in pairwise([*cuts, len(line)])]

    def begins(self, line: bytes) -> bool:
        """Whether the line has the number of an iteration."""
        return bool(_first(self.iteration, line))

    def continues(self, line: bytes, first: bytes) -> bool:
        """Whether the line may stand in the block that `first` began: it is indented, behind what launchers and
        collectors put before it, which stands before the first line too, with other digits."""
        prefix = PREFIX.match(line)
        if line[prefix.end() if prefix else 0 :][:1].isspace():
            return True
        found = _first(self.iteration, first)
        lead = DIGITS.sub(b"0", first[: found[0].start() + found[1]] if found else b"")
        form = DIGITS.sub(b"0", line[:MAX_LEAD])
        shared = next((at for at, pair in enumerate(zip(lead, form, strict=False)) if pair[0] != pair[1]), len(lead))
        return shared > 0 and form[shared : shared + 1].isspace()

    def validated(self, line: bytes) -> dict[str, float]:
        """The numbers of an evaluation; {} for any other line."""
        found = _first(self.validation, line)
        return {span.column: span.value(line) for span in _groups(*found)} if found else {}

    def is_launch(self, line: bytes) -> bool:
        """Whether the line is printed only when a training begins."""
        return bool(_first(self.launch, line))

    def is_end(self, line: bytes) -> bool:
        """Whether the line is printed only at the planned end."""
        return bool(_first(self.end, line))

    def rest(self, line: bytes, seen: set[str]) -> list[Span]:
        """The further numbers of an iteration, on its line or on the next of its block, but for columns `seen`."""
        found = list[Span]()
        for match in self._field.finditer(line[:MAX_LINE]) if self._field else ():
            column, multiplier, divisor = self.fields[match[1]]
            if self.fallback and (word := QUALIFIER.search(line[: match.start()])) and word[1].lower() not in PLAIN:
                continue  # the best loss, the loss of a part
            if column in seen or (column == "iterations_per_second" and _digits(match[2]) < RATE_DIGITS):
                continue
            if not multiplier:
                unit = PRINTED.match(line, match.end())
                if not unit:
                    continue
                multiplier, divisor = UNITS[unit[1].decode()]
            seen = seen | {column}
            found.append(Span(column, *match.span(2), multiplier * SUFFIXES.get(match[3] or b"", 1.0), divisor))
        return found


def _number(found: re.Match[bytes]) -> float:
    return float(found["iteration"].replace(b",", b""))


def _digits(number: bytes) -> int:
    """How many significant digits are printed."""
    return len(number.lower().partition(b"e")[0].translate(None, b"+-.,").lstrip(b"0"))


def _first(patterns: Sequence[re.Pattern[bytes]], line: bytes) -> tuple[re.Match[bytes], int] | None:
    """The first match of a pattern in the line, or in the line after its prefix, and where that begins."""
    if len(line) > MAX_LINE:
        return None
    prefix = PREFIX.match(line)
    for start in (0, prefix.end()) if prefix else (0,):
        for pattern in patterns:
            if found := pattern.search(line[start:]):
                return found, start
    return None


def _groups(found: re.Match[bytes], start: int) -> list[Span]:
    spans = []
    for name, text in found.groupdict().items():
        if text is not None:
            column, multiplier, divisor = column_of(name.replace("__", " "))
            begin, end = found.span(name)
            if text[-1:] in SUFFIXES:
                end, multiplier = end - 1, multiplier * SUFFIXES[text[-1:]]
            if re.fullmatch(NUMBER, found.string[begin:end]):
                spans.append(Span(column, start + begin, start + end, multiplier, divisor))
    return sorted(spans, key=lambda span: span.column != "iteration")


@functools.lru_cache(1 << 10)
def column_of(text: str) -> tuple[str, float, float]:
    """Column and factors of "column unit"; ValueError for one that nothing reads."""
    name, _, unit = text.strip().partition(" ")
    unit = GROUP_UNITS.get(unit, unit)
    known = name in COLUMNS or re.fullmatch(r"[a-z]\w*_(?:loss|norm)", name)
    require(bool(known), "column", name, f"is none of {', '.join(sorted(COLUMNS))}, nor a ..._loss or ..._norm")
    require(unit in UNITS, "unit", unit, f"is none of {', '.join(filter(None, UNITS))}")
    return name, *UNITS[unit]
