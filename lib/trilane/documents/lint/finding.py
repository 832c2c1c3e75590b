"""LintFinding: a contradiction in a row of a table; LintTable: a table as the rules see it; helpers of the rules."""

from collections.abc import Sequence
from dataclasses import dataclass

from trilane.documents.lint.flops_rules import Formula
from trilane.documents.markdown import TableRow

CONFIGURATION = (
    *("gpus", "nodes", "size", "dp", "tp", "cp", "pp", "chunks", "mbs", "gbs"),
    *("batch", "heads", "hidden", "layers", "zero", "seq", "vocab", "async"),
)


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """A contradiction in a row: the rule, a message, and the value that is likely correct."""

    line: int
    row: int
    rule: str
    message: str
    likely: str


@dataclass(frozen=True, kw_only=True)
class LintTable:
    """A table in its document: GPUs per node, the usual TP, the formula of its TFLOPs (`own_formula`: its
    own rows show it, else those of another table), the rows of all tables."""

    rows: Sequence[TableRow]
    gpus_per_node: float
    usual_tp: float
    formula: Formula | None
    own_formula: bool
    others: Sequence[TableRow]

    def gpus(self, row: TableRow) -> float:
        """The GPUs of a row, from its column or its nodes; NaN if unknown."""
        return row.number("gpus") if row.has("gpus") else row.number("nodes") * self.node(row)

    def node(self, row: TableRow) -> float:
        """GPUs per node, of the row or else of the document; 0 if unknown."""
        return row.number("gpus_per_node") if row.has("gpus_per_node") else self.gpus_per_node


def finding(row: TableRow, rule: str, message: str, likely: str) -> LintFinding:
    """A finding about a row."""
    return LintFinding(line=row.line, row=row.row, rule=rule, message=message, likely=likely)


def plain(value: float) -> str:
    """A number in four digits, or whole."""
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def known(row: TableRow, *names: str) -> bool:
    """Whether the row, or the text around it, has positive numbers for all the names."""
    return all(row.number(name) == row.number(name) and row.number(name) > 0 for name in names)


def configuration(row: TableRow) -> tuple[tuple[str, str | float], ...]:
    """The cells of a row that identify its configuration."""
    cells = [(n, cell) for n, cell in row.cells.items() if (n in CONFIGURATION or n.startswith(":")) and cell.text]
    return tuple((name, cell.number if cell.number == cell.number else cell.text) for name, cell in cells)


def same_configuration(row: TableRow, other: TableRow) -> bool:
    """Whether two rows agree in all that both have, at least TP, MBS, GBS, and one of PP and DP."""
    both = [name for name in CONFIGURATION if known(row, name) and known(other, name)]
    enough = {"tp", "mbs", "gbs"} <= set(both) and {"pp", "dp"} & set(both)
    return bool(enough) and all(row.number(name) == other.number(name) for name in both)
