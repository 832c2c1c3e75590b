"""Document: a text with tables of measured runs in Markdown or CSV, the log lines between them, and the facts in its
prose that hold for the rows of a table: model shapes, machine sizes, constants.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.documents import markdown
from trilane.documents.markdown import TableRow, known_columns
from trilane.logs.dialects import megatron
from trilane.logs.reading.reader import blocks

ASSIGNED = re.compile(
    r"\b(N?HIDDEN(?:_SIZE)?|N?LAYERS|N?HEADS|NUM_LAYERS|SEQ_LEN(?:GTH)?|VOCAB_(?:SIZE|LENGTH)|[TPD]P(?:_SIZE)?|GBS|MBS"
    r"|MICRO_BATCH_SIZE|GLOBAL_BATCH_SIZE)\s*=\s*(\d[\d_]*(?:\.\d+)?)(k?)\b(?!\s*\*)"
)
PERL = {"gbs": "gbs", "seqlen": "seq", "ms": "size"}  # variables of the one-line programs that compute TFLOPs
SCRIPT = re.compile(r"\$(gbs|seqlen|ms)=(\d+(?:\.\d+)?)")
TFLOPS_SEQ = re.compile(r"\*4\*2\*(\d+)\*\$gbs")
SENTENCES = [
    ("seq", re.compile(r"[Ss]eq(?:uence)?[ _-]?len(?:gth)? is (\d+)")),
    ("size", re.compile(r"\b(\d+(?:\.\d+)?)B model\b")),
    ("nodes", re.compile(r"^\W*(\d+) nodes?, ")),
    ("dp", re.compile(r"\b(\d+) replicas?\b")),
    ("stated_size", re.compile(r"Model size: (\d+(?:\.\d+)?)B")),
    ("gpus_per_node", re.compile(r"--gres=gpu:([1-9]\d*)")),
    ("gpus_per_node", re.compile(r"\b(\d+)[ -]gpus?(?: per)? nodes?\b")),
]
LASTING = ("seq", "vocab", "gpus_per_node")  # hold for the whole document
OF_THE_MACHINE = ("nodes", "dp")  # precede a shape, as in `10 nodes, 1 replica`


class Prose:
    """Reads the lines outside tables in order; `facts` holds at the current line.

    A heading clears all facts but LASTING; a new group of assignments with a shape clears the shape before it. The
    facts of a list item, of a line with `all` and of a script hold for the whole section, also for tables above them.
    """

    def __init__(self) -> None:
        self.facts: dict[str, float] = {}
        self.section = 0  # counts headings
        self.by_section: dict[int, dict[str, set[float]]] = {}
        self._group = False
        self._fenced = False

    def read(self, line: str) -> None:
        """One line of text."""
        if line.lstrip().startswith("```"):
            self._fenced = not self._fenced
        elif line.startswith("#") and not self._fenced:
            self.section += 1
            self.facts = {k: v for k, v in self.facts.items() if k in LASTING}
            self._group = False
            return
        if line.startswith("* "):  # a remark about results
            return
        found = assignments(line)
        wide = line.startswith("-") or " all " in f" {line}" or "$" in line
        if "$" in line:
            found |= script(line)
        if wide:
            for name, value in found.items():
                self.by_section.setdefault(self.section, {}).setdefault(name, set()).add(value)
        if "$gbs" in line or "$ms" in line:
            return
        if {"hidden", "layers"} & found.keys() and not self._group:
            self.facts = {k: v for k, v in self.facts.items() if k in LASTING + OF_THE_MACHINE}
        self._group = bool(found)
        self.facts |= found

    def around(self, section: int) -> dict[str, float]:
        """The facts of a whole section that have a single value."""
        return {name: min(values) for name, values in self.by_section.get(section, {}).items() if len(values) == 1}


def assignments(line: str) -> dict[str, float]:
    """The facts of a line, named as table columns; a name with two values is a choice, not a fact."""
    values: dict[str, set[float]] = {}
    for name, digits, thousand in ASSIGNED.findall(line):
        column = known_columns()[name.lower().replace("_", "")]
        values.setdefault(column, set()).add(float(digits.replace("_", "")) * (1000 if thousand else 1))
    found = {name: min(numbers) for name, numbers in values.items() if len(numbers) == 1}
    for name, pattern in SENTENCES:
        if match := pattern.search(line):
            found.setdefault(name, float(match[1]))
    return found


def script(line: str) -> dict[str, float]:
    """Batch, sequence length and size (billions) in a one-line program that computes TFLOPs."""
    found = {PERL[name]: float(value) for name, value in SCRIPT.findall(line)}
    if seq := TFLOPS_SEQ.search(line):
        found["seq"] = float(seq[1])
    return found


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


def read_document(
    text: str,
    tables: Callable[[list[str]], Iterator] = markdown.markdown_tables,
    wanted: Callable[[list[str]], bool] = markdown.measures,
) -> Document:
    """Parse a text; `tables` finds the tables among its lines, and those with a `wanted` header are read."""
    lines = text.splitlines()
    prose, rows, passages, statements = Prose(), list[TableRow](), list[Passage](), []
    found = [t for t in tables(lines) if wanted(t[1])]
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
