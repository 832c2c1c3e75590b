"""The linter: finds contradictions in typed tables of measured runs, in Markdown or CSV."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilane.documents import markdown
from trilane.documents.document import Document, read_document
from trilane.documents.lint import comparison_rules, flops_rules, product_rules, rate_rules, size_rules, statement_rules
from trilane.documents.lint.finding import LintFinding, LintTable, known
from trilane.documents.markdown import TableRow
from trilane.documents.units import UNCERTAIN
from trilane.logs.reading.reader import blocks
from trilane.utils.tables import Table
from trilane.utils.validation import require

if TYPE_CHECKING:
    import pandas as pd

RULES = (
    *(product_rules.products, product_rules.swaps, comparison_rules.units, size_rules.formulas, size_rules.sizes),
    *(rate_rules.rates, comparison_rules.duplicates, comparison_rules.outliers),
)
CODE = re.compile(r"(?: {4}|\t)\s{0,20}(?![-*+\d])\S")  # an indented line that is no item of a list


@dataclass(frozen=True, kw_only=True)
class LintReport(Table):
    """Counts of a file's tables and rows about measured runs, and the findings in the order of the file."""

    file: str
    tables: int
    rows: int
    findings: list[LintFinding]

    def to_frame(self) -> "pd.DataFrame":
        """A row per finding: line, rule, message, likely correction."""
        import pandas as pd

        names = ("line", "rule", "message", "likely")
        return pd.DataFrame({name: [getattr(f, name) for f in self.findings] for name in names})

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        findings = [{"says" if k == "message" else k: v for k, v in asdict(f).items()} for f in self.findings]
        return {"file": self.file, "tables": self.tables, "rows": self.rows, "findings": findings}


def lint(path: Path | str) -> LintReport:
    """The findings of a Markdown or CSV file.

    Raises ValueError if it cannot be read, or holds no table of measured runs.
    """
    path = Path(path)
    text = b"".join(blocks(path)).decode("utf-8-sig", "replace")
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    document = read_document(text, markdown.csv_tables if is_csv else markdown.markdown_tables, markdown.compares)
    if not document.tables and not is_csv:
        document = read_document(text, markdown.csv_tables, markdown.compares)
    rule = "holds no table with a time, TFLOPs, a rate or memory and two of GPUs, nodes, size, DP, TP, PP, MBS, GBS"
    require(document.tables > 0, "table", path, rule)
    return LintReport(file=str(path), tables=document.tables, rows=len(document.rows), findings=findings(document))


def findings(document: Document) -> list[LintFinding]:
    """The contradictions in a document, in its order, each rule at most once per row.

    Of a row with swapped columns only that is reported, as it causes the other contradictions.
    """
    found = [f for table in lint_tables(document) for rule in RULES for f in rule(table)]
    found += statements(document)
    first: dict[tuple[int, str], LintFinding] = {}
    for f in found:
        first.setdefault((f.line, f.rule), f)
    repeated = {f.line for f in found if f.rule == "duplicate"}  # and an outlier for the same reason
    swapped = {f.line for f in found if f.rule == "swap"}
    kept = [f for f in first.values() if f.rule != "outlier" or f.line not in repeated]
    kept = [f for f in kept if f.rule == "swap" or f.line not in swapped]
    return sorted(kept, key=lambda f: f.line)


def lint_tables(document: Document) -> list[LintTable]:
    """The tables of a document, each with the facts of the whole document."""
    tables: dict[tuple[int, str], list[TableRow]] = {}
    for row in document.rows:
        part = row.cells["table"].text if "table" in row.cells else ""
        tables.setdefault((row.table, part), []).append(row)
    found = list(tables.values())
    places = {id(row): place for place, rows in enumerate(found) for row in rows}
    nodes = [_gpus_per_node(table) for table in found]

    def gpus(row: TableRow) -> float:
        node = row.number("gpus_per_node") if row.has("gpus_per_node") else nodes[places[id(row)]]
        return row.number("gpus") if row.has("gpus") else row.number("nodes") * node

    found = [_certain(table, gpus) for table in found]
    places = {id(row): place for place, rows in enumerate(found) for row in rows}
    others = [row for table in found for row in table]
    chosen = flops_rules.choose_formulas(found, gpus)
    own = [flops_rules.choose_formulas([table], gpus)[0] is not None for table in found]
    usual = _usual(document.rows, "tp")
    return [
        LintTable(rows=table, gpus_per_node=node, usual_tp=usual, formula=formula, own_formula=proven, others=others)
        for table, node, formula, proven in zip(found, nodes, chosen, own, strict=True)
    ]


def _certain(table: list[TableRow], gpus: Callable[[TableRow], float]) -> list[TableRow]:
    """The rows, without times of unknown unit where no formula gives their TFLOPs from these as seconds."""
    if not any("time" in row.cells and row.cells["time"].unit == UNCERTAIN for row in table):
        return table
    if flops_rules.choose_formulas([table], gpus)[0] is not None:
        return table
    return [replace(row, cells={k: v for k, v in row.cells.items() if k != "time"}) for row in table]


def _gpus_per_node(rows: Sequence[TableRow]) -> float:
    """GPUs per node, by the table: of most rows with both, else of most rows' DP x TP x PP; else by the text, if it has
    one number; 0 if unknown."""
    both = [row for row in rows if row.has("nodes") and row.has("gpus") and not row.has("gpus_per_node")]
    ratios = [row.number("gpus") / row.number("nodes") for row in both]
    if not both:
        split = [row for row in rows if row.has("nodes") and known(row, "nodes", "dp", "tp", "pp")]
        products = [
            row.number("dp") * row.number("tp") * row.number("pp") * product_rules.context(row) for row in split
        ]
        ratios = [product / row.number("nodes") for product, row in zip(products, split, strict=True)]
    if ratios:
        (node, most), *_ = Counter(ratios).most_common(1)
        usual = most > 2 and most + 1 >= len(ratios) if both else 2 * most > len(ratios)
        if node == int(node) and most > 1 and usual:  # nodes may be of two kinds, and one of them shared
            return node
    texts = {row.number("gpus_per_node") for row in rows if known(row, "gpus_per_node")}
    return texts.pop() if len(texts) == 1 and not both else 0.0


def _usual(rows: Sequence[TableRow], name: str) -> float:
    counts = Counter(row.number(name) for row in rows if known(row, name))
    return counts.most_common(1)[0][0] if counts else 0.0


def statements(document: Document) -> Iterator[LintFinding]:
    """Contradictions in the arithmetic and the sizes that the text around the tables states."""
    fenced = False
    for line, text, facts in document.statements:
        if text.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            continue
        yield from statement_rules.stated(line, text, fenced=fenced or CODE.match(text) is not None)
        yield from size_rules.stated(line, text, facts)
