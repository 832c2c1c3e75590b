"""The definition by which a table computed its TFLOPs, and the TFLOPs of a row by that definition."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trilane.documents.markdown import TableRow

VOCABULARY = (250_880, 50_257, 50_304, 50_688)  # padded sizes tried where the text gives none: BLOOM's, GPT-2's
EXACT = 5e-4  # tolerance of a formula with all terms: printed rows agree to 3e-4
LOOSE = 0.03  # tolerance for sizes with or without embeddings, which differ by this much


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A definition of TFLOP/s per GPU: `work(row)` is the TFLOPs of an iteration, NaN if the row lacks a number."""

    name: str
    work: Callable[[TableRow], float]
    exact: float = 0.0

    def tflops(self, row: TableRow, gpus: float) -> float:
        """TFLOP/s per GPU."""
        return self.work(row) / (row.seconds * gpus) if row.seconds > 0 and gpus > 0 else math.nan

    def agrees(self, row: TableRow, gpus: float) -> bool:
        """Whether the printed TFLOPs are those of the formula, up to rounding."""
        value = self.tflops(row, gpus)
        return value > 0 and abs(row.number("tflops") / value - 1) <= self.exact + rounding(row)


def rounding(row: TableRow) -> float:
    """Relative difference that rounding allows between the printed TFLOPs and those of the printed time.

    Both may be rounded, or the TFLOPs were computed from the printed time and truncated.
    """
    time, tflops = (
        row.cells[n].half / abs(row.cells[n].number) if row.has(n) and row.cells[n].number else 0.0
        for n in ("time", "tflops")
    )
    return max(2 * tflops, time + tflops) + 1e-9


def _size(factor: float) -> Callable[[TableRow], float]:
    # documents 001 and 004: size x factor x 2 x sequence x batch
    return lambda row: row.number("size") * factor * 2 * row.number("seq") * row.number("gbs") / 1e3


def _blocks(row: TableRow) -> float:
    """The estimate of the chronicles until 02-20: blocks without embeddings; replicated parameters count TP times."""
    L, h, t = row.number("layers"), row.number("hidden"), row.number("tp")
    return L * (12 * h * h + 13 * h + 6 * h * (t - 1)) * 8 * row.number("seq") * row.number("gbs") / 1e12


def _narayanan(factor: float, vocabulary: int, attention: float = 1.0) -> Callable[[TableRow], float]:
    """Narayanan et al. 2021, arXiv:2104.04473: factor B s L h^2 (1 + s/(6h) + V/(factor/6 L h)).

    factor 96 with full recomputation, 72 without; `attention` 1/2 halves causal attention, as Megatron >= 0.16 does.
    """

    def work(row: TableRow) -> float:
        B, s, L, h = (row.number(name) for name in ("gbs", "seq", "layers", "hidden"))
        V = row.number("vocab")
        V = vocabulary if V != V or V == 250_000 else V  # a document's 250k is rounded
        return factor * B * s * (L * h * h + attention * s * L * h / 6 + 6 * V * h / factor) / 1e12

    return work


SIZE = [Formula(name=f"size x {n} x 2 x sequence x batch", work=_size(n)) for n in (4, 3)]
# for sizes that were rounded, or counted otherwise than in the TFLOPs: only gross errors show
ROUGH = [Formula(name=f"{f.name}, roughly", work=f.work, exact=LOOSE) for f in SIZE]
NARAYANAN = (("with recomputation", 96, 1.0), ("without recomputation", 72, 1.0), ("causal attention halved", 72, 0.5))
FORMULAS = [
    *SIZE,
    Formula(name="4 x 2 x sequence x batch x blocks without embeddings", work=_blocks, exact=EXACT / 2),
    *(
        Formula(name=f"Narayanan et al., {words}", work=_narayanan(factor, V, attention), exact=EXACT)
        for V in VOCABULARY
        for words, factor, attention in NARAYANAN
    ),
]


def is_measured(row: TableRow) -> bool:
    """Whether the row has TFLOPs and a time."""
    return row.has("tflops") and row.number("tflops") > 0 and row.seconds > 0


def choose_formulas(tables: Sequence[Sequence[TableRow]], gpus: Callable[[TableRow], float]) -> list[Formula | None]:
    """For each table the formula of most of its rows, else of the nearest table before it, else after it.

    None if no formula can be computed, or none fits any table.
    """
    own: list[Formula | None] = []
    for table in tables:
        own.append(_own(table, gpus, next((f for f in reversed(own) if f), None)))
    chosen: list[Formula | None] = []
    for place, formula in enumerate(own):
        near = [*reversed(own[:place]), *own[place + 1 :]]
        chosen.append(formula or next((f for f in near if f and _applies(f, tables[place], gpus)), None))
    return chosen


def _own(table: Sequence[TableRow], gpus: Callable[[TableRow], float], before: Formula | None) -> Formula | None:
    rows = [row for row in table if is_measured(row)]
    for formulas in (FORMULAS, ROUGH):
        counts = [sum(formula.agrees(row, gpus(row)) for row in rows) for formula in formulas]
        # One of few rows agrees with a rough formula by chance.
        if rows and max(counts) * 2 >= len(rows) and (formulas is FORMULAS or max(counts) > 1 or len(rows) == 1):
            best = [f for f, count in zip(formulas, counts, strict=True) if count == max(counts)]
            return before if before in best else best[0]
    return None


def _applies(formula: Formula, table: Sequence[TableRow], gpus: Callable[[TableRow], float]) -> bool:
    values = [formula.tflops(row, gpus(row)) / row.number("tflops") for row in table if is_measured(row)]
    return any(value == value for value in values)


def implied_size(row: TableRow, gpus: float) -> float:
    """Billions of parameters that the old estimate with factor 4 was computed with; NaN if unknown."""
    work = row.number("tflops") * row.seconds * gpus
    return work * 1e3 / (8 * row.number("seq") * row.number("gbs"))
