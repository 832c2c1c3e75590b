"""Finding: what is wrong in a line of a table; Sheet: a table as the rules see it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trilane.documents.lint.flops_rules import Formula
from trilane.documents.markdown import HandRow

KEY = (
    *(
        "gpus",
        "nodes",
        "size",
        "dp",
        "tp",
        "cp",
        "pp",
        "chunks",
        "mbs",
        "gbs",
        "heads",
        "hidden",
        "layers",
        "zero",
        "seq",
    ),
    *("vocab", "async"),
)


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """What is wrong in a line: the rule, the contradiction in words, the value that is likely right."""

    line: int
    row: int
    rule: str
    says: str
    likely: str


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table with what the document around it tells: GPUs per node, the usual TP, the TFLOPs' formula, other rows."""

    rows: Sequence[HandRow]
    gpus_per_node: float
    usual_tp: float
    formula: Formula | None
    others: Sequence[HandRow]

    def gpus(self, row: HandRow) -> float:
        """The GPUs of a row, NaN where neither it nor its nodes tell."""
        return row.number("gpus") if row.has("gpus") else row.number("nodes") * self.node(row)

    def node(self, row: HandRow) -> float:
        """GPUs per node, as the row or all of the document says; 0 where nothing tells."""
        return row.number("gpus_per_node") if row.has("gpus_per_node") else self.gpus_per_node


Rule = Callable[[Sheet], Iterator[LintFinding]]


def finding(row: HandRow, rule: str, says: str, likely: str) -> LintFinding:
    """A finding about a row."""
    return LintFinding(line=row.line, row=row.row, rule=rule, says=says, likely=likely)


def plain(value: float) -> str:
    """A number as people print it."""
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def known(row: HandRow, *names: str) -> bool:
    """Whether the row, or the text around it, tells all of them."""
    return all(row.number(name) == row.number(name) and row.number(name) > 0 for name in names)


def key(row: HandRow) -> tuple[tuple[str, str | float], ...]:
    """The configuration that a row prints."""
    cells = [(n, cell) for n, cell in row.cells.items() if (n in KEY or n.startswith(":")) and cell.text]
    return tuple((name, cell.number if cell.number == cell.number else cell.text) for name, cell in cells)


def alike(row: HandRow, other: HandRow) -> bool:
    """Whether two rows, perhaps of different tables, are one configuration as far as both tell, with batch and TP."""
    both = [name for name in KEY if known(row, name) and known(other, name)]
    told = {"tp", "mbs", "gbs"} <= set(both) and {"pp", "dp"} & set(both)
    return bool(told) and all(row.number(name) == other.number(name) for name in both)
