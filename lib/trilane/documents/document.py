"""Documents: Markdown or CSV with tables of measured runs, and log lines between them, in the order of the text."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.documents import markdown
from trilane.documents.markdown import HandRow
from trilane.documents.prose import Prose
from trilane.logs import megatron
from trilane.logs.stream import blocks

LARGEST = 1 << 22  # bytes: nobody typed more; larger files are logs

# the line between a Markdown table's header and body; blanks of one line only, each with one place in the pattern:
# where \s also matched line ends, the time grew with the cube of the blank lines
RULE = re.compile(rb"^[ \t]*(?:\|[ \t]*)?:?-+:?[ \t]*\|[-:| \t\r]*$", re.M)
PRINTED = re.compile(r"TFLOPs: (\d+\.\d+)")


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Lines that hold an iteration line of a framework; `line` is the first; `facts` as HandRow's."""

    line: int
    section: int
    text: str
    facts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Document:
    """What was typed: rows of tables about measured runs, passages of logs, statements with a line of their own."""

    tables: int
    rows: list[HandRow]
    passages: list[Passage]
    statements: list[tuple[int, str, dict[str, float]]]


def text(path: Path) -> str:
    """The text of a file that holds a table about measured runs, "" for every other file."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        return ""
    try:
        data = b"".join(blocks(path))
    except ValueError:
        return ""  # who reads it as a log says why
    if not RULE.search(data):
        return ""
    content = data.decode("utf-8", "replace")
    found = markdown.markdown(content.splitlines())
    return content if any(markdown.measures(header) for _, header, _ in found) else ""


def read_document(text: str, tables: Callable[[list[str]], Iterator] = markdown.markdown) -> Document:
    """The document of a text; `tables` finds the tables among its lines."""
    lines = text.splitlines()
    prose, rows, passages, statements = Prose(), list[HandRow](), list[Passage](), []
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
        _told_by_log(replace(r, facts={**prose.around(where[i]), **r.facts}), passages, where[i])
        for i, r in enumerate(rows)
    ]
    return Document(tables=len(found), rows=rows, passages=_joined(passages), statements=statements)


def _told_by_log(row: HandRow, passages: list[Passage], section: int) -> HandRow:
    """A row without a time that prints the TFLOPs of one log line of its section is that run: the line's time holds."""
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
    """Lines that follow each other are one passage."""
    joined: list[Passage] = []
    for passage in passages:
        last = joined[-1] if joined else None
        if last and last.line + last.text.count("\n") + 1 == passage.line:
            joined[-1] = replace(last, text=f"{last.text}\n{passage.text}")
        else:
            joined.append(passage)
    return joined
