"""Rules about units: cells in another unit than their column or the other rows."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from trilane.documents.lint.finding import LintFinding, LintTable, finding, known, plain
from trilane.documents.lint.flops_rules import is_measured
from trilane.documents.markdown import TableRow


def units(table: LintTable) -> Iterator[LintFinding]:
    """Cells in another unit than their column: s and ms, it/s, GB and GiB, MB; sizes in M instead of B."""
    for name in ("time", "mem", "size"):
        rows = [row for row in table.rows if row.has(name)]
        yield from _labels(name, rows)
        if name != "time":
            yield from _thousands(name, rows)
    yield from _times(table)


def _labels(name: str, rows: Sequence[TableRow]) -> Iterator[LintFinding]:
    units = Counter(row.cells[name].unit for row in rows if row.cells[name].unit)
    if name == "size" or len(units) < 2:
        return
    usual = units.most_common(1)[0][0]
    for row in rows:
        unit = row.cells[name].unit
        if unit and _kind(unit) != _kind(usual):
            words = f"{row.cells[name].text} is in {unit}, the column in {usual}"
            yield finding(row, "unit", words, _converted(row, name, usual))


def _kind(unit: str) -> str:
    return re.sub(r"^(secs?|seconds)$", "s", unit.lower())


def _converted(row: TableRow, name: str, usual: str) -> str:
    if name == "time":
        value = row.seconds
        return f"{plain(value * 1e3)} ms" if _kind(usual) == "ms" else f"{plain(value)} s"
    sizes = {"mb": 1e6, "mib": 2**20, "gb": 1e9, "gib": 2**30, "tb": 1e12}
    unit = row.cells[name].unit.lower()
    if unit in sizes and usual.lower() in sizes:
        return f"{plain(row.cells[name].number * sizes[unit] / sizes[usual.lower()])} {usual}"
    return f"{row.cells[name].number:g} {usual}"


def _thousands(name: str, rows: Sequence[TableRow]) -> Iterator[LintFinding]:
    values = [row.number(name) for row in rows if row.number(name) > 0]
    if len(values) < 3:
        return
    usual = statistics.median(values)
    for row in rows:
        off = row.number(name) / usual
        # memory varies little in a table; sizes do, so only a factor of about 1000 is taken for another unit
        far = off > 300 or 0 < off < 1 / 300
        if far and (name == "mem" or abs(abs(math.log(off)) - math.log(1e3)) < 0.4):
            unit = {"mem": "GB", "size": "B"}[name]
            right = row.number(name) / (1e3 if off > 1 else 1e-3)
            message = f"{row.cells[name].text} is {off:.2g} times the other rows'"
            yield finding(row, "unit", message, f"{plain(right)} {unit}")


def _times(table: LintTable) -> Iterator[LintFinding]:
    rows = [(r, table.gpus(r)) for r in table.rows if r.seconds == r.seconds and not is_measured(r)]
    work = [(r, r.seconds * (g if g > 0 else 1) / (r.number("gbs") if known(r, "gbs") else 1)) for r, g in rows]
    if len(work) < 3:
        return
    usual = statistics.median(value for _, value in work)
    for row, value in work:
        if words := factor(value / usual):
            message = f"{row.cells['time'].text} is {value / usual:.2g} times the other rows' time: {words}"
            yield finding(row, "unit", message, f"{plain(row.seconds * usual / value)} s")


def factor(off: float) -> str:
    """The unit that would explain a factor between two times, "" for none."""
    for factor, words in ((1e3, "milliseconds"), (1e-3, "kiloseconds"), (1 / 60, "minutes")):
        if abs(math.log(off / factor)) < 0.4:
            return words
    return ""
