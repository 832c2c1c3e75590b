"""Tables of measured runs: each row of Markdown or CSV is a run, with what it contradicts."""

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
RULE = re.compile(r"[\s:|-]*-[\s:|-]*")  # the line below a header of Markdown
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
NUMBER = re.compile(r"([-+]?\d[\d_,]*(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-zµ][A-Za-z/.]*)?")
SUFFIXES = (".csv", ".tsv", ".md")  # of files that hold tables of rows
LARGEST = 1 << 22  # bytes; larger files are logs
SIZES = ("gpus", "nodes", "size", "dp", "tp", "pp", "mbs", "gbs")
CHOICES = (*SIZES, "chunks", "zero", "layers", "hidden", "heads", "seq")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row: the number of its line, its text, and its numbers by the columns' names
    (data/table_columns.json) in seconds, 1e9 parameters, GiB, TFLOP/s and counts.
    """

    line: int
    text: str
    numbers: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        """The number in that column; NaN without one, with which every comparison is false."""
        return self.numbers.get(name, NAN)

    @property
    def ending(self) -> Status | None:
        """How the run ended: completed where it measured something; None for a row of something
        else.
        """
        if "time" in self.numbers or "tflops" in self.numbers:
            return Status.COMPLETED
        if re.search(r"\bOOM\b", self.text):
            return Status.OOM
        if re.search(r"\bhangs?\b|\bhung\b", self.text):
            return Status.HANG
        return None


def read_runs(path: Path | str) -> list[RunLog]:
    """The runs of a file, in its order: `read_runs("slurm-4711.out")[0].iterations`.

    A log of any framework; or the Markdown or CSV tables of measured runs, of which each row is a
    run of one iteration without a number. Raises ValueError for a file that is missing, empty,
    binary, or holds no run.
    """
    path = Path(path)
    runs: list[RunLog] = []
    if path.is_file() and path.stat().st_size < LARGEST:
        lines = path.read_text("utf-8-sig", "replace").splitlines()
        every: list[Row] = []
        for header, body in tables(lines, path.suffix):
            if measures(header):
                every += rows(header, body)
        for row, problems in zip(every, wrong(every), strict=True):
            if row.ending:
                runs.append(_run(row, row.ending, problems, path))
    return runs or read_logs(path)


def wrong(every: Sequence[Row]) -> list[dict[str, str]]:
    """The contradictions of each row, but for what all of several contradict: a column that means
    something else.
    """
    of_each = [dict(contradictions(row)) for row in every]
    if len(of_each) < 3:
        return of_each
    usual = set.intersection(*map(set, of_each))
    return [{name: one[name] for name in one if name not in usual} for one in of_each]


@cache
def known_columns() -> dict[str, str]:
    """The name of a column by each way to write it, in small letters without blanks or marks."""
    names: dict[str, str] = {}
    for name, words in shipped_json("table_columns").items():
        names |= dict.fromkeys(words.split(), name)
    return names


def column(header: str) -> tuple[str, str]:
    """The name of a column ("" if unknown) and the unit in its header; ? for a time that may be
    another quantity.
    """
    # of bounded length: a line of 100,000 brackets takes no longer
    bracket = re.compile(r"[(\[]([^)\]]{0,80})[)\]]")
    unit = ""
    if outside := bracket.search(header):
        unit = outside[1].strip()
    elif inside := re.search(r"(?:_|\b)(ms|[GM]i?B|[gm]i?b|B|bytes)(?:_|\b)|iters?/s\b", header):
        unit = inside[0].strip("_")
    elif re.search(r"\bits?/s\b", header):
        unit = "it/s"
    key = _key(bracket.sub("", header))
    known = known_columns()
    name = known.get(key) or known.get(re.sub(r"(ms|[gm]i?b|bytes)$", "", key), "")
    if key in ("time", "throughput", "speed"):
        rate = known.get(_key(unit), "")
        if rate in ("tflops", "tokens", "tokens_per_gpu", "samples"):
            return rate, ""
        return name, unit or "?"
    if key.startswith("gflop"):
        unit = "GFLOPS"
    return name, unit


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9/]+", "", text.lower())


def number(name: str, text: str, unit: str = "") -> float:
    """The number of a cell in the unit of its column: seconds, 1e9 parameters, GiB (as nvidia-smi
    means GB), tokens. NaN for what is none, and for another quantity's unit.
    """
    cell = NUMBER.fullmatch(text.strip(" *`~"))
    if not cell:
        return NAN
    digits = cell[1].replace("_", "")
    # the other comma is a decimal one; two of them are no number
    digits = digits.replace(",", "" if THOUSANDS.fullmatch(digits) else ".")
    if digits.count(".") > 1:
        return NAN
    value = float(digits)
    is_possible = 0 < value < 1e15 or (name == "zero" and value == 0)
    if not is_possible:
        return NAN
    # without what it is per, as in s/it and GB/GPU
    per = r"(?:/|\s?per\s)(?:it|iter|iteration|step|gpu|card|device|node)s?$"
    plain = re.sub(per, "", (cell[2] or unit).lower())
    if name == "time" and re.fullmatch("(it|iter|iteration)s?/s(ec)?", plain):
        return 1 / value
    if name == "tflops":
        return value * {"g": 1e-3, "p": 1e3}.get(plain[:1], 1.0)
    if name == "size" and not plain and value >= 1e6:
        return value / 1e9  # a count of parameters
    if not plain:
        return value
    factor: float = shipped_json("table_units").get(name, {}).get(plain, NAN)
    return value * factor


def measures(header: list[str]) -> bool:
    """Whether the header is that of measured runs: time or TFLOPs, and two numbers of a
    configuration.
    """
    names = {column(name)[0] for name in header}
    return bool(names & {"time", "tflops"}) and len(names & {*SIZES}) >= 2


def tables(lines: list[str], suffix: str) -> Iterator[tuple[list[str], Lines]]:
    """Each table of a file with that suffix as header, and rows with the numbers of their lines,
    from 1. Raises ValueError for what is no CSV.
    """
    if suffix not in (".csv", ".tsv"):
        yield from _markdown_tables(lines)
        return
    begin = 0
    while begin < len(lines) and (not lines[begin].strip() or lines[begin].startswith("#")):
        begin += 1
    delimiter = max(",;\t", key="".join(lines[begin : begin + 1]).count)
    reader = csv.reader(lines[begin:], delimiter=delimiter)
    cells: Lines = []
    try:
        for row in reader:
            if not "".join(row[:1]).startswith("#"):
                # a quoted cell may hold line ends, which the reader counts
                cells.append((begin + reader.line_num, row))
    except csv.Error as error:  # a cell of more than 131072 characters
        raise ValueError(f"table=line {begin + reader.line_num}: is no CSV ({error})") from None
    if cells:
        yield cells[0][1], cells[1:]


def _markdown_tables(lines: list[str]) -> Iterator[tuple[list[str], Lines]]:
    header: list[str] = []
    body: Lines = []
    for number, line in enumerate([*lines, ""], 1):
        if header and "|" in line:
            body.append((number, _cells(line)))
            continue
        if header:
            yield header, body
        header = []
        if number > 1 and "|" in line and RULE.fullmatch(line) and "|" in lines[number - 2]:
            header = _cells(lines[number - 2])
            body = []


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in inner.split("|")]


def rows(header: list[str], body: Lines) -> Iterator[Row]:
    """The rows that are not empty; of two columns of one quantity the first counts."""
    columns = [column(name) for name in header]
    if any(name == "tflops" for name, _ in columns):  # a bare `time` then is no rate
        columns = [(name, unit.replace("?", "s")) for name, unit in columns]
    for line, texts in body:
        numbers: dict[str, float] = {}
        seen = {""}
        for (name, unit), text in zip(columns, texts, strict=False):
            value = NAN
            if name not in seen:
                value = number(name, text, unit)
            seen.add(name)
            if value == value:
                numbers[name] = value
        if any(texts):
            yield Row(line=line, text=" | ".join(map(str.strip, texts)), numbers=numbers)


def _run(row: Row, status: Status, problems: Mapping[str, str], path: Path) -> RunLog:
    """A row as a run of one iteration; its arguments have the names of columns, the size in 1e9
    parameters.
    """
    text = endings.text(row.text.encode())
    measured: dict[str, float] = {}
    memory: dict[str, float] = {}
    if status is Status.COMPLETED:
        rate = row["tflops"] * 1e12
        measured = {"iteration": NAN, "sec_per_it": row["time"], "flops_per_s_per_gpu": rate}
    if "mem" in row.numbers:
        memory = {"rank": 0.0, "max_reserved": row["mem"] * 2**30}
    arguments: dict[str, int | float] = {}
    for name in CHOICES:
        if name in row.numbers:
            value = row[name]
            arguments[name] = int(value) if value.is_integer() else value
    return RunLog(
        source=path,
        iterations=frame(columns_of([measured], measured)),
        memory=frame(columns_of([memory], memory), ("rank",)),
        status=status,
        evidence=f"line {row.line}: {text}",
        dialect="table",
        arguments={**arguments, "line": row.line},
        problems=tuple(
            Problem(rule="row", column=name, message=message, line=row.line, evidence=text)
            for name, message in problems.items()
        ),
    )


def contradictions(row: Row) -> Iterator[tuple[str, str]]:
    """What contradicts the other numbers of a row, and how: GPUs, batch, FLOP/s."""
    product = row["dp"] * row["tp"] * row["pp"] * row.numbers.get("cp", 1.0)
    gpus = row["gpus"]
    for other in (row["nodes"] * row["gpus_per_node"], product):
        if gpus != gpus:
            gpus = other
    if abs(product - gpus) >= 1 and row["nodes"] != 1:  # of a single node some may be idle
        yield "gpus", f"DP x TP x PP = {product:.10g}, but {gpus:.10g} GPUs"
    replicas = row["mbs"] * row["dp"]
    if row["gbs"] % replicas > 0 or abs(row["gbs"] / replicas - row["chunks"]) > 0:
        product_text = f"MBS {row['mbs']:.10g} x DP {row['dp']:.10g}"
        yield "gbs", f"GBS {row['gbs']:.10g} is not microbatches x {product_text}"
    L = row["layers"]
    h = row["hidden"]
    # L (12 h^2 + 13 h) parameters in 1e9 without embeddings (document 003), and as stated
    sizes = [size for size in (L * (12 * h + 13) * h / 1e9, row["size"]) if size == size]
    if sizes:
        # 6 FLOPs a parameter and token, 8 with recomputation; embeddings and attention are left
        # out, so a tenth is allowed
        tokens_per_gpu_per_s = row["gbs"] * row["seq"] / row["time"] / gpus
        low = 5.4 * tokens_per_gpu_per_s * min(sizes) / 1e3
        high = 8.8 * tokens_per_gpu_per_s * max(sizes) / 1e3
        if row["tflops"] < low or row["tflops"] > high:
            by_size = f"by size, batch and seconds {low:.4g} to {high:.4g}"
            yield "tflops", f"{row['tflops']:.4g} TFLOP/s, but {by_size}"
