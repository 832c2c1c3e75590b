"""The runs of a file: of a log, or of a document, where each measured row of a table and each quoted log is a run."""

from collections.abc import Collection, Mapping
from pathlib import Path

from trilane.documents.document import Passage, read_document
from trilane.documents.document import text as document_text
from trilane.documents.markdown import TableRow
from trilane.logs import endings
from trilane.logs.arguments import Value
from trilane.logs.reading.reader import Reader
from trilane.logs.run import RunLog, finish, read_logs
from trilane.logs.table import NumericTable
from trilane.workspace.status import Status

NUMBERS = (
    *("gpus", "nodes", "size", "dp", "tp", "pp", "chunks", "mbs", "gbs", "zero"),
    *("layers", "hidden", "heads", "seq"),
)
GIB = 2**30  # the GB of a table are those of nvidia-smi, which are GiB


def runs(text: str, path: Path) -> list[RunLog]:
    """The runs of a document's text, in its order: rows that measured something, ran out of memory or hung; logs.

    A row is a run of one iteration without a number. Its evidence is its line; its arguments are the numbers of the
    row and of the text around it, under the names of the tables' columns (size in billions of parameters).
    """
    document = read_document(text)
    found = [(row.line, _row(row, path)) for row in document.rows if _is_run(row)]
    for passage in document.passages:
        found += [(passage.line, log) for log in _logs(passage, path)]
    return [log for _, log in sorted(found, key=lambda pair: pair[0])]


def read_runs(path: Path | str, keep: Collection[str] | None = None, spill: Path | None = None) -> list[RunLog]:
    """The runs of a file: a log of any framework, or a Markdown document with tables of measured runs, in its order.

    In a document, each row that measured something is a run, and so is each quoted log. `keep` and `spill`, for long
    logs, are as in logs.run.read_logs. Raises ValueError for a file that is missing, empty, binary, or holds no run.
    """
    path = Path(path)
    text = document_text(path)
    return runs(text, path) if text else read_logs(path, keep, spill)


def _is_run(row: TableRow) -> bool:
    return row.seconds == row.seconds or row.has("tflops") or row.ran_out or row.hangs


def _row(row: TableRow, path: Path) -> RunLog:
    iterations, memory = NumericTable(), NumericTable()
    measured = {"sec_per_it": row.seconds, "flops_per_s_per_gpu": row.number("tflops") * 1e12}
    if any(value == value for value in measured.values()):
        iterations.add({"iteration": float("nan"), **measured})
    if row.memory_gb == row.memory_gb:
        memory.add({"rank": 0.0, "max_reserved": row.memory_gb * GIB})
    return RunLog(
        source=path,
        iterations=iterations.frame(),
        memory=memory.frame(("rank",)),
        status=Status.OOM if row.ran_out else Status.HANG if row.hangs else Status.COMPLETED,
        evidence=f"line {row.line}: {endings.text(row.text.encode())}",
        dialect="table",
        arguments=_arguments(row) | {"line": row.line},
    )


def _arguments(row: TableRow) -> dict[str, Value]:
    values = {name: row.number(name) for name in NUMBERS}
    return _whole(values) | ({"notes": row.cells["notes"].text} if row.cells.get("notes") else {})


def _logs(passage: Passage, path: Path) -> list[RunLog]:
    reader = Reader()
    reader.feed(passage.text.encode())
    facts = _whole({name: value for name, value in passage.facts.items() if name in NUMBERS})
    runs = reader.close()
    for run in runs:
        run.arguments |= {n: v for n, v in facts.items() if n not in run.arguments} | {"line": passage.line}
    return [finish(run, path, float("inf")) for run in runs]


def _whole(values: Mapping[str, float]) -> dict[str, Value]:
    """The values that are not NaN, whole numbers as int."""
    return {name: int(v) if v == int(v) else v for name, v in values.items() if v == v}
