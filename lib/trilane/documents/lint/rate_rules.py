"""Rules about rates: tokens and samples per second with the batch, the sequence length, the GPUs and the time."""

import math
from collections.abc import Iterator

from trilane.documents.lint.finding import LintFinding, LintTable, finding, known, plain
from trilane.documents.markdown import TableRow

AGREE = 0.02  # relative difference that rounding and averaging leave
OFF = 0.08  # relative difference that is no rounding
WORDS = {"tokens_per_gpu": "tokens/s/GPU", "tokens": "tokens/s", "samples": "samples/s"}


def rates(table: LintTable) -> Iterator[LintFinding]:
    """Rates that do not follow from the other numbers of their row, in a table whose other rows' rates do."""
    checked = set[int]()
    for name, source in ((name, source) for name in WORDS for source in ("time", *WORDS) if source != name):
        values = [(row, _expected(table, row, name, source)) for row in table.rows if known(row, name)]
        ratios = [(row, value, row.number(name) / value) for row, value in values if value > 0]
        right = sum(abs(ratio - 1) <= AGREE for _, _, ratio in ratios)  # those that rounding hides do not vote
        if 2 * right <= len(ratios):  # the columns may mean something else
            continue
        for row, value, ratio in ratios:
            if abs(math.log(ratio)) > OFF + _rounding(row, name) + _rounding(row, source) and row.row not in checked:
                checked.add(row.row)
                words = "the batch and the time give" if source == "time" else f"its {WORDS[source]} give"
                message = f"{row.cells[name].text} {WORDS[name]}, but {words} {plain(value)}"
                yield finding(row, "rate", message, f"{plain(value)} {WORDS[name]}")


def _rounding(row: TableRow, name: str) -> float:
    """Relative error of a number that was rounded, or cut, to its last digit."""
    return 2 * row.cells[name].half / abs(row.cells[name].number) if row.has(name) else 0.0


def _expected(table: LintTable, row: TableRow, name: str, source: str) -> float:
    """The rate `name` by the time of an iteration or by another rate; NaN if a number for it is missing."""
    gpus, seq = table.gpus(row), row.number("seq")
    gpus = gpus if gpus > 0 else math.nan
    if source == "time":
        samples = row.number("gbs") / row.seconds
    else:
        samples = row.number(source) * {"tokens_per_gpu": gpus, "tokens": 1.0, "samples": seq}[source] / seq
    return samples * {"tokens_per_gpu": seq / gpus, "tokens": seq, "samples": 1.0}[name]
