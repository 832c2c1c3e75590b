"""Tables of measured runs: a row of a Markdown or CSV table is a run of one iteration."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from trilane.logs import endings
from trilane.logs.run import RunLog, read_logs
from trilane.logs.table import NAN, NumericTable
from trilane.utils.validation import read_text, shipped_json
from trilane.workspace.status import Status

Table = tuple[list[str], list[tuple[int, list[str]]]]  # header; rows by the number of their line
RULE = re.compile(r"[\s:|-]*-[\s:|-]*")  # the line below a header of Markdown
NUMBER = re.compile(r"(\d{1,15}(?:\.\d{0,15})?)\s*([a-z]*)")
SUFFIXES = (".csv", ".md")  # of files that hold tables of rows
LARGEST = 1 << 22  # bytes of such a file
SIZES = ("gpus", "nodes", "size", "dp", "tp", "pp", "mbs", "gbs")
CHOICES = (*SIZES, "chunks", "zero", "layers", "hidden", "heads", "seq")


def read_runs(path: Path | str) -> list[RunLog]:
    """The runs of a file, in its order: `read_runs("slurm-4711.out")[0].iterations`.

    A log of any framework; or the tables of measured runs in a Markdown or CSV file, whose columns
    have names of data/table_columns.json, and of which each row is a run of one iteration without a
    number.
    Raises ValueError for a file that is missing, empty, binary, or holds no run.
    """
    path = Path(path)
    runs: list[RunLog | None] = []
    if path.suffix in SUFFIXES:
        lines = read_text(path, "log", LARGEST, "replace").splitlines()
        for header, body in tables(lines, path.suffix):
            columns = [_column(name) for name in header]
            runs += [_run(path, line, columns, cells) for line, cells in body]
    return list(filter(None, runs)) or read_logs(path)


def tables(lines: Sequence[str], suffix: str) -> list[Table]:
    """Each table of a file with that suffix; raises ValueError for what is no CSV. A cell holds no
    line end.
    """
    if suffix != ".csv":
        return _markdown_tables(lines)
    try:
        every = list(enumerate(csv.reader(lines), 1))
    except csv.Error as error:  # a cell of more than 131072 characters
        raise ValueError(f"table={error}: is no CSV") from None
    rows = [(line, row) for line, row in every if row and not row[0].startswith("#")]
    return [(rows[0][1], rows[1:])] if rows else []


def _markdown_tables(lines: Sequence[str]) -> list[Table]:
    tables: list[Table] = []
    before = ""
    is_inside = False
    for number, line in enumerate(lines, 1):
        is_inside &= "|" in line
        if is_inside:
            tables[-1][1].append((number, _cells(line)))
        elif "|" in line and "|" in before and RULE.fullmatch(line):
            tables.append((_cells(before), []))
            is_inside = True
        before = line
    return tables


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in inner.split("|")]


def _column(header: str) -> str:
    """The name of a column, "" if unknown."""
    word = re.sub(r"[^a-z0-9/]", "", header.lower())
    for name, words in shipped_json("table_columns").items():
        if word in words.split():
            return str(name)
    return ""


def number(name: str, text: str) -> float:
    """The number of a cell in the unit of its column: seconds, 1e9 parameters, GiB (as nvidia-smi
    means GB), TFLOP/s, tokens. NaN for what is none, and in an unknown unit.
    """
    cell = NUMBER.fullmatch(text.strip().lower())
    if not cell:
        return NAN
    factor = 1.0
    if cell[2]:
        factor = shipped_json("table_units").get(name, {}).get(cell[2], NAN)
    return float(cell[1]) * factor


def _run(path: Path, line: int, columns: Sequence[str], cells: Sequence[str]) -> RunLog | None:
    """A row as a run of one iteration, with the sizes as its arguments; None for a row with fewer
    than two sizes, or that neither measured anything nor ran out of memory.
    """
    numbers: dict[str, float] = {}
    for column, text in zip(columns, cells, strict=False):
        name = column
        if column == "duration":  # a throughput or a speed, where its cells are seconds: "90.5s"
            name = "time" if text.strip().endswith("s") else ""
        value = number(name, text)
        if name and value > 0:
            numbers.setdefault(name, value)
    is_timed = "time" in numbers or "tflops" in numbers
    if len(numbers.keys() & {*SIZES}) < 2 or not (is_timed or "OOM" in cells):
        return None
    iterations = NumericTable()
    if is_timed:
        seconds = numbers.get("time", NAN)
        rate = numbers.get("tflops", NAN) * 1e12
        iterations.add({"iteration": NAN, "sec_per_it": seconds, "flops_per_s_per_gpu": rate})
    arguments: dict[str, int | float] = {"line": line}
    for name in CHOICES:
        if name in numbers:
            value = numbers[name]
            arguments[name] = int(value) if value.is_integer() else value
    return RunLog(
        source=path,
        iterations=iterations.frame(),
        memory={"max_reserved": numbers["mem"] * 2**30} if "mem" in numbers else {},
        status=Status.COMPLETED if is_timed else Status.OOM,
        evidence=f"line {line}: {endings.text(' | '.join(cells).encode())}",
        dialect="table",
        arguments=arguments,
    )
