"""Markdown and CSV tables that people typed, as rows of named cells with units."""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from trilane.documents.units import UNCERTAIN, UNSURE, is_rate, of_time, scale
from trilane.logs.table import NAN

SEPARATOR = re.compile(r"^\s*(?:\|\s*)?:?-+:?\s*(\|\s*:?-+:?\s*)+(?:\|\s*)?$|^\s*\|\s*:?-+:?\s*\|\s*$")

# 1,024.5 and 1 024.5 and 1.024,5 and 62.5 or 62,5: a mark before groups of three digits separates thousands, but not a
# single point, nor a comma after a zero
GROUPED = {
    ",": r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?",
    r"\s": r"[1-9]\d{0,2}(?:\s\d{3})+(?:[.,]\d+)?",
    r"\.": r"[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})",
    "_": r"\d[\d_]*(?:[.,]\d*)?",
}
DIGITS = "|".join(f"({form})" for form in GROUPED.values())
NUMBER = re.compile(rf"^[~≈]?\s*([-+]?)(?:{DIGITS})([eE][-+]?\d+)?\s*([A-Za-zµ][A-Za-z/.]*)?$")
UNIT = re.compile(r"[(\[]([^)\]]{0,80})[)\]]")  # of bounded length: a line of 100,000 brackets takes no longer

# unknown columns distinguish configurations, unless they are results or names
RESULT = re.compile(
    r"loss|ppl|perp|[mh]fu|tok|sampl|speed|through|latency|±|std|spread|util|time|sec|id\b|\bline|\brow|#|run|name|band|hour|day"
    r"|flop|suspect|duplicate|calc|derived|infer|from|match|kind"
)
IDENTITY = re.compile(
    r"model(?! tflop)|arch|network|hardware|device|accelerator|chip|system|dataset|precision|dtype|method"
)
IN_NAME = re.compile(r"(?:_|\b)(ms|GiB|GB|MiB|MB|gb|gib|[bB])\b|(it|iter|its|iterations)/s\b")
MARKUP = re.compile(r"</?[a-zA-Z][^<>]{0,200}>|\[\^[^\]]{1,80}\]")  # tags and footnotes
RATES = {"tflops", "tokens", "tokens_per_gpu", "samples"}
CONFIGURATION = {  # numbers that are chosen for a run
    *("gpus", "nodes", "gpus_per_node", "size", "dp", "tp", "cp", "pp", "chunks", "mbs", "gbs", "zero", "seq"),
    *("batch", "layers", "hidden", "heads", "vocab"),
}
PRODUCTS = ({"gpus", "dp", "tp"}, {"dp", "mbs", "gbs"}, {"layers", "pp"}, {"heads", "tp"})
SHAPE = {"size", "layers", "hidden", "heads"}
MAX_NUMBER = 1e15  # a larger number is no measurement


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell: its text, its number (NaN if it has none), and its unit, else that of its column."""

    text: str
    number: float = NAN
    unit: str = ""

    @property
    def half(self) -> float:
        """Half a unit of the last printed digit, the largest rounding error."""
        digits, _ = decimal(self.text)
        return 0.5 * 10.0 ** -len(digits.partition(".")[2])


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of a table. `line` and `row` count from 1, in the file and in the table.

    `cells` and `facts`, the numbers in the text around the table (see prose.py), have the names of
    data/table_columns.json; those of unknown columns begin with a colon.
    """

    line: int
    table: int
    row: int
    text: str
    cells: Mapping[str, Cell]
    facts: Mapping[str, float] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the row itself has a valid number there: positive, or zero for the ZeRO stage."""
        return name in self.cells and (self.cells[name].number > 0 or (name == "zero" and self.cells[name].number == 0))

    def number(self, name: str) -> float:
        """The number of the row, else of the text, else NaN: seconds, billions of parameters, GB, TFLOP/s, counts."""
        if not self.has(name):
            return self.facts.get(name, NAN)
        cell = self.cells[name]
        return cell.number * scale(name, cell.number, cell.unit)

    @property
    def seconds(self) -> float:
        """Seconds per iteration, of the row or of its log line; NaN if unknown."""
        if not self.has("time"):
            return self.facts.get("seconds", NAN)
        cell = self.cells["time"]
        if is_rate(cell.unit):
            return 1 / cell.number
        return self.number("time")

    @property
    def memory_gb(self) -> float:
        """Memory as printed, in its column or at the start of a note; NaN if unknown."""
        if self.has("mem"):
            return self.number("mem")
        note = re.match(r"(\d+\.?\d*) ?Gi?B\b", self.cells["notes"].text) if "notes" in self.cells else None
        return float(note[1]) if note and "mem" not in self.cells else NAN

    @property
    def ran_out(self) -> bool:
        """Whether the row has OOM instead of a measurement."""
        return self._instead(r"\bOOM\b")

    @property
    def hangs(self) -> bool:
        """Whether the row has a hang instead of a measurement."""
        return self._instead(r"\bhangs?\b|\bhung\b")

    def _instead(self, words: str) -> bool:
        measured = self.seconds == self.seconds or self.has("tflops")
        return not measured and any(re.search(words, cell.text) for cell in self.cells.values())


@cache
def known_columns() -> dict[str, str]:
    """The name of a column by each way to write it, in small letters without blanks or marks."""
    text = resources.files("trilane").joinpath("data/table_columns.json").read_text(encoding="utf-8")
    return {word: name for name, words in json.loads(text).items() for word in words.split()}


def column(header: str) -> tuple[str, str]:
    """The name of a column ("" if unknown) and the unit in its header."""
    header = MARKUP.sub(" ", header)
    in_brackets = UNIT.search(header)
    inside = IN_NAME.search(header)
    unit = in_brackets[1].strip() if in_brackets else (inside[0].strip("_") if inside else "")
    key = re.sub(r"[^a-z0-9/]+", "", UNIT.sub("", header).lower())
    known = known_columns()
    name = known.get(key) or known.get(re.sub(r"(gib|gb|mib|mb)$", "", key), "")
    if key.startswith("gflop"):
        unit = "GFLOPS"
    elif name == "time" and not unit and (key.startswith("sec") or key == "s/it"):
        unit = "s"
    elif name == "time" and unit and not of_time(unit):
        name = known.get(re.sub(r"[^a-z0-9/]+", "", unit.lower()), "") if key in UNSURE else ""
        return (name, "") if name in RATES else ("", unit)
    return name, unit


def cell(text: str, unit: str = "") -> Cell:
    """Parse a cell; `unit` is that of its column."""
    text = MARKUP.sub("", text).strip().strip("*`").strip()
    digits, own = decimal(text)
    if not digits:
        return Cell(text=text)
    number = float(digits)
    return Cell(text=text, number=number if abs(number) < MAX_NUMBER else NAN, unit=own or unit)


def decimal(text: str) -> tuple[str, str]:
    """The number in a text, as float() reads it, and its unit; "" if there is none."""
    if not (found := NUMBER.match(text)):
        return "", ""
    sign, *forms, exponent, unit = found.groups(default="")
    ((mark, digits),) = ((m, d) for m, d in zip(GROUPED, forms, strict=True) if d)
    return sign + re.sub(mark, "", digits).replace(",", ".") + exponent, unit


def markdown_tables(lines: list[str]) -> Iterator[tuple[int, list[str], list[tuple[int, list[str]]]]]:
    """Each table as line number of the header (from 1), header, and rows with their line numbers."""
    at = 0
    while at + 1 < len(lines):
        if "|" in lines[at] and SEPARATOR.match(lines[at + 1]) and not SEPARATOR.match(lines[at]):
            header, rows, start = split(lines[at]), [], at + 1
            at += 2
            while at < len(lines) and "|" in lines[at]:
                rows.append((at + 1, split(lines[at])))
                at += 1
            if rows and measures(rows[0][1]) and not measures(header):  # the first line named groups of columns
                (start, header), rows = rows[0], rows[1:]
            yield start, header, rows
        else:
            at += 1


def split(line: str) -> list[str]:
    """The cells of a Markdown row; `\\|` is text."""
    inner = line.strip().removeprefix("|")
    inner = inner.removesuffix("|") if not inner.endswith("\\|") else inner
    return [part.replace("\\|", "|").strip() for part in re.split(r"(?<!\\)\|", inner)]


def csv_tables(lines: list[str]) -> Iterator[tuple[int, list[str], list[tuple[int, list[str]]]]]:
    """The table of a CSV file (comma, semicolon or tab), as in markdown_tables; nothing if its header is unknown."""
    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), None)
    if begin is None:
        return
    head = lines[begin]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(lines[begin:], delimiter=delimiter)
    try:
        header = [part.strip().lstrip("\ufeff") for part in next(reader)]
        if sum(bool(column(name)[0]) for name in header) < 2:
            return
        # a quoted cell may hold line ends, which the reader counts
        rows = [(begin + reader.line_num, row) for row in reader if not (row and row[0].startswith("#"))]
    except csv.Error as error:  # a cell of more than 131072 characters
        raise ValueError(f"table=line {begin + reader.line_num}: is no CSV ({error})") from None
    yield begin + 1, header, rows


def rows(table: int, header: list[str], body: list[tuple[int, list[str]]]) -> Iterator[TableRow]:
    """The rows that are not empty."""
    columns = [column(name) for name in header]
    for at, (name, unit) in enumerate(columns):
        if name == "time" and not unit and re.sub(r"[^a-z]+", "", header[at].lower()) in UNSURE:
            own = [decimal(texts[at].strip().strip("*`").strip())[1] for _, texts in body if at < len(texts)]
            rated = any(other == "tflops" for other, _ in columns)
            columns[at] = ("time", "") if any(map(of_time, own)) else ("time", UNCERTAIN) if rated else ("", "")
    number = 0
    for line, texts in body:
        if not any(text.strip() for text in texts):
            continue
        number += 1
        cells: dict[str, Cell] = {}
        for (name, unit), title, text in zip(columns, header, texts, strict=False):
            if name and name not in cells:
                cells[name] = cell(text, unit)
            elif not name and (IDENTITY.search(title.lower()) or not RESULT.search(title.lower())):
                cells[f":{title}"] = Cell(text=text.strip())
        yield TableRow(line=line, table=table, row=number, text=" | ".join(t.strip() for t in texts), cells=cells)


def measures(header: list[str]) -> bool:
    """Whether the header is that of measured runs: time or TFLOPs, and two numbers of a configuration."""
    names = {column(name)[0] for name in header}
    sizes = {"gpus", "nodes", "size", "dp", "tp", "pp", "mbs", "gbs"}
    return bool(names & {"time", "tflops"}) and len(names & sizes) >= 2


def compares(header: list[str]) -> bool:
    """Whether the linter can check a table: a result and two numbers of a configuration, numbers of which one is the
    product of others, or the shape of a model."""
    names = {column(name)[0] for name in header}
    results = {"time", "tflops", "mem", "mfu", *RATES}
    measured = bool(names & results) and len(names & CONFIGURATION) >= 2
    return measured or any(product <= names for product in PRODUCTS) or len(names & SHAPE) >= 3
