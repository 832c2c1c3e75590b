"""Hand-written tables of measured runs, in Markdown or CSV: each row is a run, with what its
numbers contradict.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trilane.logs import endings
from trilane.logs.checks import Problem
from trilane.logs.run import RunLog, read_logs
from trilane.logs.table import NAN, columns_of, frame
from trilane.utils.validation import shipped_json
from trilane.workspace.status import Status

Lines = list[tuple[int, list[str]]]  # the cells of each row, with the number of its line
RULE = re.compile(r"\s*(?:\|\s*)?:?-+:?\s*\|[-:|\s]*$")  # below a header
# a comma before three digits, but not after a zero: 0,125 is 1/8
THOUSANDS = r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?"
NUMBER = re.compile(
    rf"[~≈]?\s*([-+]?(?:{THOUSANDS}|[1-9]\d{{0,2}}(?:\s\d{{3}})+(?:[.,]\d+)?|\d[\d_]*(?:[.,]\d*)?)(?:[eE][-+]?\d+)?)"
    r"\s*([A-Za-zµ][A-Za-z/.]*)?"
)
MARKUP = re.compile(r"</?[a-zA-Z][^<>]{0,200}>|\[\^[^\]]{1,80}\]")  # tags and footnotes
SUFFIXES = (".csv", ".tsv", ".md")  # of files that hold tables of rows
CHOICES = (
    *("gpus", "nodes", "size", "dp", "tp", "pp", "mbs", "gbs"),
    *("chunks", "zero", "layers", "hidden", "heads", "seq"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row: the number of its line, its text, and its numbers by the columns' names
    (data/table_columns.json) in seconds, 1e9 parameters, GiB, TFLOP/s and counts.
    """

    line: int
    text: str
    numbers: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.numbers.get(name, NAN)

    @property
    def ending(self) -> Status | None:
        """How the run ended: completed where it measured something; None for a row of something
        else.
        """
        if self["time"] == self["time"] or "tflops" in self.numbers:
            return Status.COMPLETED
        words = {r"\bOOM\b": Status.OOM, r"\bhangs?\b|\bhung\b": Status.HANG}
        return next((words[word] for word in words if re.search(word, self.text)), None)


def read_runs(path: Path | str) -> list[RunLog]:
    """The runs of a file, in its order: `read_runs("slurm-4711.out")[0].iterations`.

    A log of any framework; or the Markdown or CSV tables of measured runs, of which each row is a
    run of one iteration without a number. Raises ValueError for a file that is missing, empty,
    binary, or holds no run.
    """
    path = Path(path)
    is_small = path.is_file() and path.stat().st_size < 1 << 22  # larger files are logs
    lines = path.read_text("utf-8-sig", "replace").splitlines() if is_small else []
    found = [
        row
        for header, body in tables(lines, path.suffix)
        if measures(header)
        for row in rows(header, body)
    ]
    return _runs(found, path) or read_logs(path)


def _runs(found: Sequence[Row], path: Path) -> list[RunLog]:
    return [
        _run(row, row.ending, one, path)
        for row, one in zip(found, wrong(found), strict=True)
        if row.ending
    ]


def wrong(found: Sequence[Row]) -> list[dict[str, str]]:
    """The contradictions of each row, but for what all of several contradict: a column that means
    something else.
    """
    of_each = [dict(contradictions(row)) for row in found]
    usual = set.intersection(*map(set, of_each)) if len(of_each) > 2 else set()
    return [{name: text for name, text in one.items() if name not in usual} for one in of_each]


@cache
def known_columns() -> dict[str, str]:
    """The name of a column by each way to write it, in small letters without blanks or marks."""
    return {
        word: name
        for name, words in shipped_json("table_columns").items()
        for word in words.split()
    }


def column(header: str) -> tuple[str, str]:
    """The name of a column ("" if unknown) and the unit in its header; ? for a time that may be
    another quantity.
    """
    header = MARKUP.sub(" ", header)
    bracket = re.compile(
        r"[(\[]([^)\]]{0,80})[)\]]"
    )  # of bounded length: a line of 100,000 brackets takes no longer
    inside = re.search(r"(?:_|\b)(ms|[GM]i?B|[gm]i?b|[bB]|bytes)(?:_|\b)|(it|iter)s?/s\b", header)
    outside = bracket.search(header)
    unit = outside[1].strip() if outside else inside[0].strip("_") if inside else ""
    key, of_unit = (
        re.sub(r"[^a-z0-9/]+", "", text.lower()) for text in (bracket.sub("", header), unit)
    )
    known = known_columns()
    name = known.get(key) or known.get(re.sub(r"(ms|[gm]i?b|bytes)$", "", key), "")
    if key in ("time", "throughput", "speed"):
        is_rate = known.get(of_unit) in ("tflops", "tokens", "tokens_per_gpu", "samples")
        return (known[of_unit], "") if is_rate else (name, unit or "?")
    return name, "GFLOPS" if key.startswith("gflop") else unit


def number(name: str, text: str, unit: str = "") -> float:
    """The number of a cell in the unit of its column; NaN for what is none, and for another
    quantity's unit.
    """
    if not (found := NUMBER.fullmatch(MARKUP.sub("", text).strip().strip("*`").strip())):
        return NAN
    # from a unit to what a column is in: seconds, 1e9 parameters, GiB (as nvidia-smi means GB),
    # tokens
    digits, units = re.sub(r"[\s_]", "", found[1]), shipped_json("table_units")
    value = float(digits.replace(",", "" if re.fullmatch(THOUSANDS, digits) else "."))
    # without what it is per, as in s/it and GB/GPU
    plain = re.sub(
        r"(?:/|\s?per\s)(?:it|iter|iteration|step|gpu|card|device|node)s?$",
        "",
        (found[2] or unit).lower(),
    )
    if not (0 < value < 1e15 or (name == "zero" and value == 0)):
        return NAN
    if name == "time" and re.fullmatch("(it|iter|iteration)s?/s(ec)?", plain):
        return 1 / value
    if name == "size" and not plain and value >= 1e6:
        return value / 1e9
    if name == "tflops":
        return value * {"g": 1e-3, "p": 1e3}.get(plain[:1], 1.0)
    # a count may name what it counts; a batch in tokens is no batch in sequences
    counts = name not in units and re.match(
        r"gpus?|nodes?|layers?|heads?|seqs?|sequences|samples|micro-?batch", plain
    )
    return value * (1.0 if counts or not plain else units.get(name, {}).get(plain, NAN))


def measures(header: list[str]) -> bool:
    """Whether the header is that of measured runs: time or TFLOPs, and two numbers of a
    configuration.
    """
    names = {column(name)[0] for name in header}
    return bool(names & {"time", "tflops"}) and len(names & {*CHOICES[:8]}) >= 2


def tables(lines: list[str], suffix: str) -> Iterator[tuple[list[str], Lines]]:
    """Each table of a file with that suffix as header, and rows with the numbers of their lines,
    from 1.
    """
    return csv_tables(lines) if suffix in SUFFIXES[:2] else markdown_tables(lines)


def markdown_tables(lines: list[str]) -> Iterator[tuple[list[str], Lines]]:
    """Each table as header, and rows with the numbers of their lines, from 1."""
    stop = 0
    for at in range(len(lines) - 1):
        if (
            at >= stop
            and "|" in lines[at]
            and RULE.match(lines[at + 1])
            and not RULE.match(lines[at])
        ):
            stop = next((n for n in range(at + 2, len(lines)) if "|" not in lines[n]), len(lines))
            cells = [(n + 1, _split(lines[n])) for n in (at, *range(at + 2, stop))]
            yield cells[0][1], cells[1:]


def _split(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    inner = inner.removesuffix("|") if not inner.endswith("\\|") else inner  # `\|` is text
    return [part.replace("\\|", "|").strip() for part in re.split(r"(?<!\\)\|", inner)]


def csv_tables(lines: list[str]) -> Iterator[tuple[list[str], Lines]]:
    """The table of a CSV file (comma, semicolon or tab), as in markdown_tables."""
    begin = next((n for n, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
    reader = csv.reader(
        lines[begin:], delimiter=max(",;\t", key="".join(lines[begin : begin + 1]).count)
    )
    try:
        # a quoted cell may hold line ends, which the reader counts
        cells = [
            (begin + reader.line_num, row) for row in reader if not "".join(row[:1]).startswith("#")
        ]
    except csv.Error as error:  # a cell of more than 131072 characters
        raise ValueError(f"table=line {begin + reader.line_num}: is no CSV ({error})") from None
    if cells:
        yield cells[0][1], cells[1:]


def rows(header: list[str], body: Lines) -> Iterator[Row]:
    """The rows that are not empty; of two columns of one quantity the first counts."""
    columns = [column(name) for name in header]
    if any(name == "tflops" for name, _ in columns):
        columns = [(name, "s" if unit == "?" else unit) for name, unit in columns]
    for line, texts in body:
        cells: dict[str, tuple[str, str]] = {}
        for (name, unit), text in zip(columns, texts, strict=False):
            cells.setdefault(name, (text, unit))
        noted = re.match(r"(\d+\.?\d*) ?Gi?B\b", cells.get("notes", ("", ""))[0].strip())
        cells = ({"mem": (noted[1], "")} if noted else {}) | cells
        numbers = {
            name: value
            for name, cell in cells.items()
            if name and (value := number(name, *cell)) == value
        }
        if any(texts):
            yield Row(line=line, text=" | ".join(map(str.strip, texts)), numbers=numbers)


def _run(row: Row, status: Status, wrong: Mapping[str, str], path: Path) -> RunLog:
    """A row as a run of one iteration; its arguments have the names of columns, the size in 1e9
    parameters.
    """
    chosen = {name: row[name] for name in CHOICES if name in row.numbers}
    text, measured, held = endings.text(row.text.encode()), dict[str, float](), dict[str, float]()
    if status is Status.COMPLETED:
        rate = row.numbers.get("tflops", NAN) * 1e12
        measured = {"iteration": NAN, "sec_per_it": row["time"], "flops_per_s_per_gpu": rate}
    if "mem" in row.numbers:
        held = {"rank": 0.0, "max_reserved": row["mem"] * 2**30}
    return RunLog(
        source=path,
        iterations=frame(columns_of([measured], measured)),
        memory=frame(columns_of([held], held), ("rank",)),
        status=status,
        evidence=f"line {row.line}: {text}",
        dialect="table",
        arguments={name: int(v) if v == int(v) else v for name, v in chosen.items()}
        | {"line": row.line},
        problems=tuple(
            Problem(rule="row", column=c, message=wrong[c], line=row.line, evidence=text)
            for c in wrong
        ),
    )


def contradictions(row: Row) -> Iterator[tuple[str, str]]:
    """What contradicts the other numbers of a row, and how: GPUs, batch, FLOP/s, rates."""
    degrees = row["dp"] * row["tp"] * row["pp"] * row.numbers.get("cp", 1.0)
    known = (row["gpus"], row["nodes"] * row["gpus_per_node"], degrees)
    gpus, replicas = next((n for n in known if n == n), NAN), row["mbs"] * row["dp"]
    if abs(degrees - gpus) >= 1 and row["nodes"] != 1:  # of a single node some may be idle
        yield "gpus", f"DP x TP x PP = {degrees:.10g}, but {gpus:.10g} GPUs"
    if row["gbs"] % replicas > 0 or abs(row["gbs"] / replicas - row.numbers.get("chunks", NAN)) > 0:
        yield (
            "gbs",
            f"GBS {row['gbs']:.10g} is not microbatches x MBS {row['mbs']:.10g} x DP {row['dp']:.10g}",
        )
    L, h, tokens = row["layers"], row["hidden"], row["gbs"] * row["seq"]
    # L (12 h^2 + 13 h) parameters in 1e9 without embeddings (document 003), and as stated
    sizes = [size for size in (L * (12 * h + 13) * h / 1e9, row["size"]) if size == size]
    # 6 FLOPs a parameter and token, 8 with recomputation; embeddings and attention are left out, so
    # a tenth is allowed
    low, high = (
        f * tokens * s(sizes, default=NAN) / (row["time"] * gpus) / 1e3
        for f, s in ((5.4, min), (8.8, max))
    )
    if row.numbers.get("tflops", NAN) < low or row.numbers.get("tflops", NAN) > high:
        yield (
            "tflops",
            f"{row['tflops']:.4g} TFLOP/s, but by size, batch and seconds {low:.4g} to {high:.4g}",
        )
    rates = {"samples": row["gbs"], "tokens": tokens, "tokens_per_gpu": tokens / gpus}
    for name, rate in ((name, amount / row["time"]) for name, amount in rates.items()):
        if (
            abs(row.numbers.get(name, NAN) / rate - 1) > 0.1
        ):  # a mean over other iterations differs as well
            yield name, f"{row[name]:.6g} a second, but by batch and seconds {rate:.6g}"
