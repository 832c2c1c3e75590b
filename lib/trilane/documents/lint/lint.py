"""The linter: finds contradictions in typed tables of measured runs, in Markdown or CSV."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilane.documents import markdown
from trilane.documents.document import Document, read_document
from trilane.documents.lint import comparison_rules, flops_rules, product_rules, size_rules
from trilane.documents.lint.finding import LintFinding, LintTable, known
from trilane.documents.markdown import TableRow
from trilane.logs.reader import blocks
from trilane.utils.tables import Table
from trilane.utils.validation import require

if TYPE_CHECKING:
    import pandas as pd

RULES = (
    *(product_rules.products, product_rules.swaps, comparison_rules.units, size_rules.formulas, size_rules.sizes),
    *(comparison_rules.duplicates, comparison_rules.outliers),
)
PRODUCT = re.compile(r"(?<![\w*./-])(\d+(?:\*\d+)+) ?= ?(\d+)(?![\w.*/])")


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
    document = read_document(text, markdown.csv_tables if is_csv else markdown.markdown_tables)
    if not document.tables and not is_csv:
        document = read_document(text, markdown.csv_tables)
    rule = "holds no table with a time or TFLOPs and two of GPUs, nodes, size, DP, TP, PP, MBS, GBS"
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
    nodes = [_gpus_per_node(table) or _gpus_per_node(document.rows) for table in found]

    def gpus(row: TableRow) -> float:
        node = row.number("gpus_per_node") if row.has("gpus_per_node") else nodes[places[id(row)]]
        return row.number("gpus") if row.has("gpus") else row.number("nodes") * node

    chosen = flops_rules.choose_formulas(found, gpus)
    usual = _usual(document.rows, "tp")
    return [
        LintTable(rows=table, gpus_per_node=node, usual_tp=usual, formula=formula, others=document.rows)
        for table, node, formula in zip(found, nodes, chosen, strict=True)
    ]


def _gpus_per_node(rows: Sequence[TableRow]) -> float:
    """GPUs per node by the text, else by most rows' DP x TP x PP or GPUs over their nodes; 0 if unknown."""
    counts = Counter[float]()
    for row in rows:
        if known(row, "gpus_per_node"):
            counts[row.number("gpus_per_node")] += 1
        elif row.has("nodes") and known(row, "nodes", "dp", "tp", "pp"):
            product = row.number("dp") * row.number("tp") * row.number("pp") * product_rules.context(row)
            counts[product / row.number("nodes")] += 1
        elif row.has("nodes") and row.has("gpus") and known(row, "nodes", "gpus"):
            counts[row.number("gpus") / row.number("nodes")] += 1
    return counts.most_common(1)[0][0] if counts else 0.0


def _usual(rows: Sequence[TableRow], name: str) -> float:
    counts = Counter(row.number(name) for row in rows if known(row, name))
    return counts.most_common(1)[0][0] if counts else 0.0


def statements(document: Document) -> Iterator[LintFinding]:
    """Contradictions in products and model sizes stated in the text around the tables."""
    for line, text, facts in document.statements:
        for left, right in PRODUCT.findall(text):
            value = 1
            for factor in left.split("*"):
                value *= int(factor)
            if value != int(right):
                message = f"{left} is not {right}"
                yield LintFinding(line=line, row=0, rule="product", message=message, likely=str(value))
        yield from size_rules.stated(line, text, facts)
