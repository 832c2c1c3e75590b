"""Dialects as tables: how a trainer prints an iteration, one JSON file each in data/dialects/, or
one of your own.

Own tables are the files that the environment's TRILANE_DIALECTS names, separated by colons. The
patterns give a line's numbers as *spans*, so that one parse serves all lines that differ in digits
only.
"""

import functools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from trilane.logs.table import Row, Unit
from trilane.utils.frozen import frozen
from trilane.utils.validation import (
    DATA,
    from_mapping,
    read_json,
    require,
    require_file,
    require_known,
    shipped_json,
    shown,
)

VARIABLE = "TRILANE_DIALECTS"
COLUMNS = shipped_json("log_words")["columns"]
UNITS = shipped_json("log_words")["units"]  # to seconds, bytes, nats or a share
SUFFIXES = {b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15}
NUMBER = rb"[-+]?(?:\d[\d,]*+(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|[-+]?(?i:nan|inf(?:inity)?)\b"
FIELD = (  # a name, and a number that is no part of a longer one, of a time or of a word
    rb"(?<![\w/.-])['\"]?(%s)['\"]?(?:\s{0,40}[:=]|(?=\s))\s{0,40}['\"]?(?:[A-Za-z][\w.]{0,19}\()?("
    + NUMBER
    + rb")([KMGBTP](?=FLOPS|(?![A-Za-z])))?(?![\d.]|:\d|[eE][-+]?(?:\W|$))"
)
MAX_LINE = 1 << 13  # bytes: patterns may take time that grows with the square of a line's length
PATTERNS = ("iteration", "validation", "memory", "end")


class Span(NamedTuple):
    """The position of a number in a line, its column, and the factors to the unit of the column."""

    column: str
    start: int
    stop: int
    multiplier: float
    divisor: float


def row_of(spans: Iterable[Span], line: bytes) -> Row:
    """The numbers of a line by their columns; hours, minutes and seconds of one time add up."""
    row: Row = {}
    for column, start, stop, multiplier, divisor in spans:
        number = float(line[start:stop].replace(b",", b"")) * multiplier / divisor
        row[column] = row.get(column, 0.0) + number
    return row


@frozen
class Dialect:
    """How one trainer prints its iterations: the keys of its file, as docs/guides/my-logs.md has
    them.

    `fields` gives column and unit for a number's printed name; one of `words` stands in every line
    that matters (none given: any line may). `variants` are names of programs, by what their lines
    hold.

    Raises ValueError("field=value: the rule").
    """

    name: str
    source: str = ""
    iteration: tuple[str, ...]
    fields: dict[str, str] = field(default_factory=dict)
    validation: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    lines: str = ""
    first_iteration: int = 1
    words: tuple[str, ...] = ()
    variants: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_known("lines", self.lines, ("", "json", "block", "bar"))
        require(self.iteration, "iteration", "", "must have a pattern")
        for key in PATTERNS:
            try:
                patterns = self.patterns(key)
            except (re.error, RecursionError, OverflowError) as error:
                text = shown(getattr(self, key))
                raise ValueError(f"{key}={text}: is no regular expression ({error})") from None
            for pattern in patterns:
                columns = [_column_of_group(name)[0] for name in pattern.groupindex]
                rule = "must have a group (?P<iteration>...)"
                is_numbered = key != "iteration" or "iteration" in columns
                require(is_numbered, key, pattern.pattern.decode(), rule)
        assert self.columns is not None  # which checks the rest

    @functools.cached_property
    def words_pattern(self) -> re.Pattern[bytes]:
        """Any of its words."""
        return re.compile("|".join(map(re.escape, self.words)).encode())

    def patterns(self, key: str) -> tuple[re.Pattern[bytes], ...]:
        """The compiled patterns of a key."""
        return _compiled(getattr(self, key))

    @functools.cached_property
    def columns(self) -> dict[bytes, Unit]:
        """Column, multiplier and divisor of each printed name."""
        return {key.encode(): column_of(value) for key, value in self.fields.items()}

    @functools.cached_property
    def _field(self) -> re.Pattern[bytes]:
        names = sorted(self.columns, key=len, reverse=True)
        return re.compile(FIELD % (b"|".join(map(re.escape, names)) or rb"\Z."))

    @functools.cached_property
    def is_blind(self) -> bool:
        """Whether lines that differ in digits only are read alike: their patterns do not look at
        digits, and all numbers stand on one line.
        """
        if self.lines == "block" or "iterations_per_second" in self.fields.values():
            return False
        texts = [text for key in PATTERNS for text in getattr(self, key)]
        plain = re.sub(r"\\d|\{[\d,]*\}|0-9", "", " ".join(texts))
        return not re.search(r"\d|\(\?P=", plain)

    def iterations(self, line: bytes) -> list[Span]:
        """The numbers of an iteration line; [] for any other line."""
        every = self.every("iteration", line)
        if not every or (self.lines == "json" and not line.rstrip().endswith(b"}")):
            return []
        return every[0] + self.rest(line, {span.column for span in every[0]})

    def every(self, key: str, line: bytes) -> list[list[Span]]:
        """The numbers of each match of a key's patterns in the line."""
        every = []
        for pattern in self.patterns(key):
            every += [_groups(match) for match in pattern.finditer(line[:MAX_LINE])]
        return every

    def variant(self, line: bytes) -> str:
        """The name of the program that printed the iteration."""
        for name, pattern in self.variants.items():
            if re.search(pattern.encode(), line):
                return name
        return self.name

    def rest(self, line: bytes, seen: Collection[str]) -> list[Span]:
        """The further numbers of an iteration, on its line or on the next of its block, but for
        columns `seen`.
        """
        spans: dict[str, Span] = {}
        for match in self._field.finditer(line[:MAX_LINE]):
            column, multiplier, divisor = self.columns[match[1]]
            # a rate of two digits is too rounded to give seconds
            digits = match[2].translate(None, b"+-.,").lstrip(b"0")
            is_rounded = column == "iterations_per_second" and len(digits) < 3
            if column not in seen and not is_rounded:
                multiplier *= SUFFIXES.get(match[3], 1.0)
                spans.setdefault(column, Span(column, *match.span(2), multiplier, divisor))
        return list(spans.values())


@functools.cache
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[bytes], ...]:
    return tuple(re.compile(pattern.encode()) for pattern in patterns)


def _groups(match: re.Match[bytes]) -> list[Span]:
    spans = []
    for name, text in match.groupdict(b"").items():
        column, multiplier, divisor = _column_of_group(name)
        begin, end = match.span(name)
        if text[-1:] in SUFFIXES:
            end -= 1
            multiplier *= SUFFIXES[text[-1:]]
        if re.fullmatch(NUMBER, match.string[begin:end]):
            spans.append(Span(column, begin, end, multiplier, divisor))
    return spans


def _column_of_group(name: str) -> Unit:
    return column_of(name.replace("__", " ").replace("percent", "%"))  # a group's name holds no %


@functools.lru_cache(1 << 10)
def column_of(text: str) -> Unit:
    """Column and factors of "column unit"; ValueError for one that nothing reads."""
    name, _, unit = text.strip().partition(" ")
    is_known = name in COLUMNS or re.fullmatch(r"[a-z]\w*_(?:loss|norm)", name)
    rule = f"is none of {', '.join(sorted(COLUMNS))}, nor a ..._loss or ..._norm"
    require(is_known, "column", name, rule)
    require(unit in UNITS, "unit", unit, f"is none of {', '.join(filter(None, UNITS))}")
    return name, *UNITS[unit]


def read_dialect(path: Path) -> Dialect:
    """The dialect of a JSON file; raises ValueError("dialects=FILE: field=value: the rule")."""
    require_file("dialects", path)
    table = read_json(path, "dialects")
    try:
        return from_mapping(Dialect, table, "dialect")
    except ValueError as error:
        raise ValueError(f"dialects={path}: {error}") from None


def holding(line: bytes) -> list[Dialect]:
    """The dialects of which the line has a word."""
    return [table for table in dialects() if table.words_pattern.search(line)]


@functools.cache
def _read_all(named: str) -> tuple[Dialect, ...]:
    by_name: dict[str, Dialect] = {}
    paths = [Path(name) for name in named.split(os.pathsep) if name]
    for path in (*paths, *sorted((DATA / "dialects").glob("*.json"))):
        dialect = read_dialect(path)
        by_name.setdefault(dialect.name, dialect)
    return tuple(by_name.values())


def dialects() -> tuple[Dialect, ...]:
    """All dialects; one of your own replaces that of the same name."""
    return _read_all(os.environ.get(VARIABLE, ""))


def use(paths: Sequence[Path]) -> None:
    """Add tables for this process and those that it starts; ValueError for a bad one."""
    names = os.pathsep.join([*map(str, paths), os.environ.get(VARIABLE, "")])
    _read_all(names)
    os.environ[VARIABLE] = names
