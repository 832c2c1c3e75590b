"""Units: cells that stand in another unit than their column or their neighbours."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from trilane.documents.lint.finding import LintFinding, Sheet, finding, known, plain
from trilane.documents.lint.flops_rules import both
from trilane.documents.markdown import HandRow


def units(sheet: Sheet) -> Iterator[LintFinding]:
    """Cells in another unit than their column: s and ms, it/s, GB and GiB, MB; sizes in M where B is meant."""
    for name in ("time", "mem", "size"):
        rows = [row for row in sheet.rows if row.has(name)]
        yield from _labels(name, rows)
        if name != "time":
            yield from _thousands(name, rows)
    yield from _times(sheet)


def _labels(name: str, rows: Sequence[HandRow]) -> Iterator[LintFinding]:
    said = Counter(row.cells[name].unit for row in rows if row.cells[name].unit)
    if name == "size" or len(said) < 2:
        return
    usual = said.most_common(1)[0][0]
    for row in rows:
        unit = row.cells[name].unit
        if unit and _kind(unit) != _kind(usual):
            words = f"{row.cells[name].text} stands in {unit}, where the column has {usual}"
            yield finding(row, "unit", words, _converted(row, name, usual))


def _kind(unit: str) -> str:
    return re.sub(r"^(secs?|seconds)$", "s", unit.lower())


def _converted(row: HandRow, name: str, usual: str) -> str:
    if name == "time":
        value = row.seconds
        return f"{plain(value * 1e3)} ms" if _kind(usual) == "ms" else f"{plain(value)} s"
    sizes = {"mb": 1e6, "mib": 2**20, "gb": 1e9, "gib": 2**30, "tb": 1e12}
    unit = row.cells[name].unit.lower()
    if unit in sizes and usual.lower() in sizes:
        return f"{plain(row.cells[name].number * sizes[unit] / sizes[usual.lower()])} {usual}"
    return f"{row.cells[name].number:g} {usual}"


def _thousands(name: str, rows: Sequence[HandRow]) -> Iterator[LintFinding]:
    values = [row.number(name) for row in rows if row.number(name) > 0]
    if len(values) < 3:
        return
    usual = statistics.median(values)
    for row in rows:
        off = row.number(name) / usual
        # memory is of one order in a table; sizes are not, so only one that is off by just a thousand is another unit
        far = off > 300 or 0 < off < 1 / 300
        if far and (name == "mem" or abs(abs(math.log(off)) - math.log(1e3)) < 0.4):
            unit = {"mem": "GB", "size": "B"}[name]
            right = row.number(name) / (1e3 if off > 1 else 1e-3)
            yield finding(
                row, "unit", f"{row.cells[name].text} is {off:.2g} times the other rows'", f"{plain(right)} {unit}"
            )


def _times(sheet: Sheet) -> Iterator[LintFinding]:
    rows = [(r, sheet.gpus(r)) for r in sheet.rows if r.seconds == r.seconds and not both(r)]
    work = [(r, r.seconds * (g if g > 0 else 1) / (r.number("gbs") if known(r, "gbs") else 1)) for r, g in rows]
    if len(work) < 3:
        return
    usual = statistics.median(value for _, value in work)
    for row, value in work:
        if words := factor(value / usual):
            said = f"{row.cells['time'].text} is {value / usual:.2g} times the other rows' time: {words}"
            yield finding(row, "unit", said, f"{plain(row.seconds * usual / value)} s")


def factor(off: float) -> str:
    """What a factor says about the unit: milliseconds for seconds, minutes, hours; "" for none."""
    for factor, words in ((1e3, "milliseconds"), (1e-3, "kiloseconds"), (1 / 60, "minutes")):
        if abs(math.log(off / factor)) < 0.4:
            return words
    return ""
