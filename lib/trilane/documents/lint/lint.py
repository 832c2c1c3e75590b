"""The linter: hand-written tables of measured runs, in Markdown or CSV, and what contradicts itself in them."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trilane.documents import markdown
from trilane.documents.document import Document, read_document
from trilane.documents.lint import flops_rules, product_rules, repeat_rules, size_rules, unit_rules
from trilane.documents.lint.finding import LintFinding, Sheet, known
from trilane.documents.markdown import HandRow
from trilane.logs.stream import blocks
from trilane.utils.validation import require

RULES = (
    product_rules.products,
    product_rules.swaps,
    unit_rules.units,
    size_rules.formulas,
    size_rules.sizes,
    repeat_rules.duplicates,
    repeat_rules.outliers,
)

PRODUCT = re.compile(r"(?<![\w*./-])(\d+(?:\*\d+)+) ?= ?(\d+)(?![\w.*/])")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a file holds: tables of measured runs, their rows, and the findings in the file's order."""

    file: str
    tables: int
    rows: int
    findings: list[LintFinding]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("file", metavar="FILE", help="Markdown or CSV with tables of measured runs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the findings: 0 where there are none, 1 where there are; ValueError where no table can be read."""
    report = lint(args.file)
    if args.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        for f in report.findings:
            print(f"{report.file}:{f.line}: {f.rule}: {f.says}; likely: {f.likely}")
        print(
            f"{report.file}: {report.tables} tables, {report.rows} rows, {len(report.findings)} findings",
            file=sys.stderr,
        )
    return 1 if report.findings else 0


def lint(path: Path | str) -> Report:
    """The findings of a file; ValueError where it cannot be read, or holds no table about measured runs."""
    path = Path(path)
    text = b"".join(blocks(path)).decode("utf-8-sig", "replace")
    comma = path.suffix.lower() in (".csv", ".tsv")
    document = read_document(text, markdown.comma if comma else markdown.markdown)
    if not document.tables and not comma:
        document = read_document(text, markdown.comma)
    rule = "holds no table with a time or TFLOPs beside GPUs, nodes, size, DP, TP, PP, MBS or GBS"
    require(document.tables > 0, "table", path, rule)
    return Report(file=str(path), tables=document.tables, rows=len(document.rows), findings=findings(document))


def findings(document: Document) -> list[LintFinding]:
    """What contradicts itself in a document, in its order; of a row each rule is said once.

    Of a row whose columns were swapped only that: what else it contradicts, it contradicts for that reason.
    """
    found = [f for sheet in sheets(document) for rule in RULES for f in rule(sheet)]
    found += statements(document)
    first: dict[tuple[int, str], LintFinding] = {}
    for f in found:
        first.setdefault((f.line, f.rule), f)
    repeated = {f.line for f in found if f.rule == "duplicate"}  # an outlier too, for the same reason
    swapped = {f.line for f in found if f.rule == "swap"}
    kept = [f for f in first.values() if f.rule != "outlier" or f.line not in repeated]
    kept = [f for f in kept if f.rule == "swap" or f.line not in swapped]
    return sorted(kept, key=lambda f: f.line)


def sheets(document: Document) -> list[Sheet]:
    """The document's tables with what all of it tells about each."""
    tables: dict[tuple[int, str], list[HandRow]] = {}
    for row in document.rows:
        part = row.cells["table"].text if "table" in row.cells else ""
        tables.setdefault((row.table, part), []).append(row)
    found = list(tables.values())
    places = {id(row): place for place, rows in enumerate(found) for row in rows}
    nodes = [_gpus_per_node(table) or _gpus_per_node(document.rows) for table in found]

    def gpus(row: HandRow) -> float:
        node = row.number("gpus_per_node") if row.has("gpus_per_node") else nodes[places[id(row)]]
        return row.number("gpus") if row.has("gpus") else row.number("nodes") * node

    chosen = flops_rules.choose(found, gpus)
    return [
        Sheet(
            rows=table, gpus_per_node=node, usual_tp=_usual(document.rows, "tp"), formula=formula_, others=document.rows
        )
        for table, node, formula_ in zip(found, nodes, chosen, strict=True)
    ]


def _gpus_per_node(rows: Sequence[HandRow]) -> float:
    """What the text says, or what most rows' DP x TP x PP or GPUs over their nodes give; 0 where nothing tells."""
    told = Counter[float]()
    for row in rows:
        if known(row, "gpus_per_node"):
            told[row.number("gpus_per_node")] += 1
        elif row.has("nodes") and known(row, "nodes", "dp", "tp", "pp"):
            told[
                row.number("dp")
                * row.number("tp")
                * row.number("pp")
                * product_rules.context(row)
                / row.number("nodes")
            ] += 1
        elif row.has("nodes") and row.has("gpus") and known(row, "nodes", "gpus"):
            told[row.number("gpus") / row.number("nodes")] += 1
    return told.most_common(1)[0][0] if told else 0.0


def _usual(rows: Sequence[HandRow], name: str) -> float:
    told = Counter(row.number(name) for row in rows if known(row, name))
    return told.most_common(1)[0][0] if told else 0.0


def statements(document: Document) -> Iterator[LintFinding]:
    """Products and model sizes that the text around the tables states."""
    for line, text, facts in document.statements:
        for left, right in PRODUCT.findall(text):
            value = 1
            for factor in left.split("*"):
                value *= int(factor)
            if value != int(right):
                says = f"{left} is not {right}"
                yield LintFinding(line=line, row=0, rule="product", says=says, likely=str(value))
        yield from size_rules.stated(line, text, facts)
