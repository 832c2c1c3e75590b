"""Typed: the runs of a document that people typed: a RunLog for each measured row, and for each log that it quotes."""

from collections.abc import Collection
from pathlib import Path

from trilane.documents.document import Passage, read_document
from trilane.documents.document import text as document_text
from trilane.documents.markdown import HandRow
from trilane.logs import endings
from trilane.logs.arguments import Value
from trilane.logs.reader import Reader
from trilane.logs.run import RunLog, finish
from trilane.logs.run import read_runs as logs_of
from trilane.logs.table import Table
from trilane.workspace.status import Status

NUMBERS = (
    "gpus",
    "nodes",
    "size",
    "dp",
    "tp",
    "pp",
    "chunks",
    "mbs",
    "gbs",
    "zero",
    "layers",
    "hidden",
    "heads",
    "seq",
)

GIB = 2**30  # a table's GB is what nvidia-smi shows, which counts in powers of 1024


def runs(text: str, path: Path) -> list[RunLog]:
    """The runs of the text in its order: rows that measured something, or ran out of memory, or hung; logs.

    A row is a run of one iteration without a number. Its evidence is its line; its arguments are the numbers of the
    row and of the text around it, by the tables' words (size in billions of parameters).
    """
    document = read_document(text)
    found = [(row.line, _row(row, path)) for row in document.rows if _says_something(row)]
    for passage in document.passages:
        found += [(passage.line, log) for log in _logs(passage, path)]
    return [log for _, log in sorted(found, key=lambda pair: pair[0])]


def read_runs(path: Path | str, keep: Collection[str] | None = None, spill: Path | None = None) -> list[RunLog]:
    """The runs of a file: of a log as logs.run.read_runs reads it, or of a Markdown document with tables of runs.

    Of a document, each row that measured something is a run, and so is each log that it quotes; `keep` and `spill` do
    not matter there. Raises ValueError as logs.run.read_runs does.
    """
    path = Path(path)
    text = document_text(path)
    return runs(text, path) if text else logs_of(path, keep, spill)


def _says_something(row: HandRow) -> bool:
    return row.seconds == row.seconds or row.has("tflops") or row.ran_out or row.hangs


def _row(row: HandRow, path: Path) -> RunLog:
    iterations, memory = Table(), Table()
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


def _arguments(row: HandRow) -> dict[str, Value]:
    values = {name: row.number(name) for name in NUMBERS}
    told: dict[str, Value] = {n: int(v) if v == int(v) else v for n, v in values.items() if v == v}
    return told | ({"notes": row.cells["notes"].text} if row.cells.get("notes") else {})


def _logs(passage: Passage, path: Path) -> list[RunLog]:
    reader = Reader()
    reader.feed(passage.text.encode())
    told: dict[str, Value] = {n: int(v) if v == int(v) else v for n, v in passage.facts.items() if n in NUMBERS}
    drafts = reader.close()
    for draft in drafts:
        draft.arguments |= {n: v for n, v in told.items() if n not in draft.arguments} | {"line": passage.line}
    return [finish(draft, path, float("inf")) for draft in drafts]
