"""Document: a text with tables of measured runs in Markdown or CSV, and log lines between them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.documents import markdown
from trilane.documents.markdown import TableRow
from trilane.documents.prose import Prose
from trilane.logs import megatron
from trilane.logs.stream import blocks

MAX_BYTES = 1 << 22  # larger files are logs, not typed documents

# the line between header and body of a Markdown table; [ \t] instead of \s, which also matches line ends: the time
# grew with the cube of the blank lines
RULE = re.compile(rb"^[ \t]*(?:\|[ \t]*)?:?-+:?[ \t]*\|[-:| \t\r]*$", re.M)
PRINTED = re.compile(r"TFLOPs: (\d+\.\d+)")


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Lines that hold an iteration line of a framework; `line` is the first; `facts` as in TableRow."""

    line: int
    section: int
    text: str
    facts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a document: table rows of measured runs, passages of logs, and other lines as statements."""

    tables: int
    rows: list[TableRow]
    passages: list[Passage]
    statements: list[tuple[int, str, dict[str, float]]]


def text(path: Path) -> str:
    """The text of a file that holds a Markdown table of measured runs, "" for any other file."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return ""
    try:
        data = b"".join(blocks(path))
    except ValueError:
        return ""  # reading it as a log gives the reason
    if not RULE.search(data):
        return ""
    content = data.decode("utf-8", "replace")
    found = markdown.markdown_tables(content.splitlines())
    return content if any(markdown.measures(header) for _, header, _ in found) else ""


def read_document(text: str, tables: Callable[[list[str]], Iterator] = markdown.markdown_tables) -> Document:
    """Parse a text; `tables` finds the tables among its lines."""
    lines = text.splitlines()
    prose, rows, passages, statements = Prose(), list[TableRow](), list[Passage](), []
    found = [t for t in tables(lines) if markdown.measures(t[1])]
    inside = {line for start, _, body in found for line in (start, start + 1, *(number for number, _ in body))}
    starts = {start: (number, header, body) for number, (start, header, body) in enumerate(found, 1)}
    where: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if number in starts:
            table, header, body = starts[number]
            for row in markdown.rows(table, header, body):
                where[len(rows)] = prose.section
                rows.append(replace(row, facts=dict(prose.facts)))
        elif number not in inside:
            if megatron.ITERATION.search(line.encode()):
                passages.append(Passage(line=number, section=prose.section, text=line, facts=dict(prose.facts)))
                continue
            prose.read(line)
            statements.append((number, line, dict(prose.facts)))
    rows = [
        _timed_by_log(replace(r, facts={**prose.around(where[i]), **r.facts}), passages, where[i])
        for i, r in enumerate(rows)
    ]
    return Document(tables=len(found), rows=rows, passages=_joined(passages), statements=statements)


def _timed_by_log(row: TableRow, passages: list[Passage], section: int) -> TableRow:
    """The row with the time of the one log line in its section that prints the same TFLOPs, if it has no own time."""
    if row.has("time") or not row.has("tflops"):
        return row
    printed = row.cells["tflops"].text
    same = [p for p in passages if p.section == section and printed in PRINTED.findall(p.text)]
    seconds = [spans for p in same for spans in megatron.iterations(p.text.encode())]
    if len(seconds) != 1:
        return row
    (time,) = (span.value(same[0].text.encode()) for span in seconds[0] if span.column == "sec_per_it")
    return replace(row, facts={**row.facts, **same[0].facts, "seconds": time})


def _joined(passages: list[Passage]) -> list[Passage]:
    """Join passages on consecutive lines."""
    joined: list[Passage] = []
    for passage in passages:
        last = joined[-1] if joined else None
        if last and last.line + last.text.count("\n") + 1 == passage.line:
            joined[-1] = replace(last, text=f"{last.text}\n{passage.text}")
        else:
            joined.append(passage)
    return joined
