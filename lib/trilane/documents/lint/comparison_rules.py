"""Rules that compare a row with the other rows of its table: units, repeats, outliers."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from trilane.documents.lint.finding import LintFinding, LintTable, configuration, finding, known, plain
from trilane.documents.lint.flops_rules import is_measured
from trilane.documents.markdown import IDENTITY, TableRow
from trilane.documents.units import UNCERTAIN

DAY_TO_DAY = 0.05  # relative difference in time that one configuration may have between two days
SLOWER = 0.15  # relative excess over the time predicted from rows with another batch
FEW_SLOWER = 0.25  # the same of the smallest batch, which fixed costs slow most
MORE = 0.05  # relative drop of memory as the microbatch grows: readings are rounded
ALIKE = 30  # factor between the sizes, or the memory, of rows of which one may be in another unit
MIN_ROWS = 3  # other rows needed for a usual value
ISOLATED = 1.6  # factor between the times per work of an outlier and of other rows


def units(table: LintTable) -> Iterator[LintFinding]:
    """Cells in another unit than their column: s and ms, it/s, GB and GiB, MB; sizes in M instead of B."""
    for name in ("time", "mem", "size"):
        rows = [row for row in table.rows if row.has(name)]
        yield from _labels(name, rows)
        if name != "time":
            yield from _thousands(name, rows)
    yield from _time_units(table)


def _labels(name: str, rows: Sequence[TableRow]) -> Iterator[LintFinding]:
    units = Counter(unit for row in rows if (unit := row.cells[name].unit) not in ("", UNCERTAIN))
    if name == "size" or len(units) < 2:
        return
    usual = units.most_common(1)[0][0]
    for row in rows:
        unit = row.cells[name].unit
        binary = "i" in unit.lower()  # MB and GB in one column are right, GB and GiB hardly
        other = _kind(unit) != _kind(usual) if name == "time" else binary != ("i" in usual.lower())
        if unit in units and other:
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
        rest = [value for value in values if value != row.number(name)]
        if rest and max(rest) > ALIKE * min(rest):  # they differ by as much themselves
            continue
        # memory varies little in a table; sizes do, so only a factor of about 1000 is taken for another unit
        far = off > 300 or 0 < off < 1 / 300
        if far and (name == "mem" or abs(abs(math.log(off)) - math.log(1e3)) < 0.4):
            unit = {"mem": "GB", "size": "B"}[name]
            right = row.number(name) / (1e3 if off > 1 else 1e-3)
            message = f"{row.cells[name].text} is {off:.2g} times the other rows'"
            yield finding(row, "unit", message, f"{plain(right)} {unit}")


def _time_units(table: LintTable) -> Iterator[LintFinding]:
    rows = [(r, table.gpus(r)) for r in table.rows if r.seconds == r.seconds and not is_measured(r)]
    sizes = [r.number("size") for r, _ in rows if r.has("size")]
    models = {tuple(v.text for k, v in r.cells.items() if IDENTITY.search(k.lower())) for r, _ in rows}
    if len(rows) < 3 or (len(sizes) < len(rows) and len(models) > 1):  # times of models of unknown size
        return
    units = ("gbs", "size") if len(sizes) == len(rows) else ("gbs",)
    each = [math.prod(r.number(name) for name in units if known(r, name)) for r, _ in rows]
    work = [(r, r.seconds * (g if g > 0 else 1) / share) for (r, g), share in zip(rows, each, strict=True)]
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


def duplicates(table: LintTable) -> Iterator[LintFinding]:
    """One configuration twice in a table, copied or with another result; days may differ somewhat."""
    seen: dict[tuple, list[TableRow]] = {}
    for row in table.rows:
        if row.seconds == row.seconds and len(configuration(row)) >= 3:
            seen.setdefault(configuration(row), []).append(row)
    for rows in seen.values():
        if len(rows) < 2:
            continue
        middle = statistics.median_low(r.seconds for r in rows)
        first = next(r for r in rows if r.seconds == middle) if len(rows) > 2 else rows[0]
        for row in rows:
            if row is not first and _contradicts(row, first):
                yield _duplicate(row, first, rows)


def _contradicts(row: TableRow, first: TableRow) -> bool:
    days = [r.cells["notes"].text if "notes" in r.cells else "" for r in (row, first)]
    return days[0] == days[1] or abs(row.seconds / first.seconds - 1) > DAY_TO_DAY


def _duplicate(row: TableRow, first: TableRow, rows: Sequence[TableRow]) -> LintFinding:
    if row.seconds == first.seconds:
        return finding(row, "duplicate", f"the configuration and the time of line {first.line} again", "one of the two")
    times = ", ".join(plain(r.seconds) for r in rows)
    memory = [r.memory_gb for r in rows]
    more = f", {', '.join(plain(m) for m in memory)} GB" if all(m == m for m in memory) and len(set(memory)) > 1 else ""
    likely = f"{plain(first.seconds)} s" if len(rows) > 2 else "another MBS in one of the two, or one slow run"
    lines = " and ".join(str(r.line) for r in rows if r is not row)
    return finding(row, "duplicate", f"the configuration of line {lines} with other results: {times} s{more}", likely)


def outliers(table: LintTable) -> Iterator[LintFinding]:
    """Memory that falls as the microbatch grows; times unlike those of other rows scaled by batch or work."""
    yield from _memory(table)
    yield from _time(table)
    yield from _isolated(table)


def _groups(rows: Sequence[TableRow], name: str) -> Iterator[list[TableRow]]:
    """Groups of rows that differ in the column `name` only, sorted by it."""
    groups: dict[tuple, list[TableRow]] = {}
    for row in rows:
        if row.has(name):
            groups.setdefault(tuple(k for k in configuration(row) if k[0] not in (name, "chunks")), []).append(row)
    for group in groups.values():
        if len(group) > 1:
            yield sorted(group, key=lambda r: r.number(name))


def _memory(table: LintTable) -> Iterator[LintFinding]:
    for group in _groups([r for r in table.rows if r.has("mem") and known(r, "mem")], "mbs"):
        for less, more in pairwise(group):
            if less.number("mbs") < more.number("mbs") and less.memory_gb > more.memory_gb * (1 + MORE):
                a, b = plain(less.memory_gb), plain(more.memory_gb)
                message = f"{a} GB at MBS {plain(less.number('mbs'))}, but {b} GB at MBS {plain(more.number('mbs'))}"
                likely = f"under {b} GB, such as {_digits(a, b)}"
                yield finding(less, "outlier", f"{message} (line {more.line})", likely)


def _digits(high: str, low: str) -> str:
    """The likely reading: of all numbers that differ from `high` in one digit, the one nearest to 0.8 x `low`.

    0.8 is the average factor in the chronicles as the microbatch halves.
    """
    made = [high[:i] + d + high[i + 1 :] for i in range(len(high)) for d in "0123456789" if high[i].isdigit()]
    below = [text for text in made if float(low) * 0.6 < float(text) < float(low)]
    right = min(below, key=lambda text: abs(float(text) - 0.8 * float(low)), default=plain(float(low) * 0.8))
    return f"{right} GB"


def _time(table: LintTable) -> Iterator[LintFinding]:
    """Time scales with microbatches + PP - 1 (2104.04473, section 2.2); fixed costs slow small batches more."""
    timed = [r for r in table.rows if r.seconds == r.seconds and known(r, "dp", "mbs", "gbs")]
    for group in _groups(timed, "gbs"):
        scaled = []
        for row in group:
            steps = row.number("gbs") / (row.number("dp") * row.number("mbs"))
            scaled.append(row.seconds / (steps + (row.number("pp") if known(row, "pp") else 1) - 1))
        usual = min(scaled) if len(scaled) == 2 else statistics.median(scaled)
        for row, value in zip(group, scaled, strict=True):
            slower = FEW_SLOWER if row is group[0] else SLOWER
            if value > usual * (1 + slower) and not factor(value / usual):
                excess = f"{plain(row.seconds)} s for GBS {plain(row.number('gbs'))} is {value / usual - 1:.0%} above"
                message = f"{excess} what the rows with another GBS predict"
                yield finding(row, "outlier", message, f"{plain(row.seconds * usual / value)} s")


def _isolated(table: LintTable) -> Iterator[LintFinding]:
    """A time per unit of work far from the median of the rows with the same TP, and from each of them."""
    rows = [(r, table.gpus(r)) for r in table.rows if r.seconds == r.seconds and known(r, "size", "gbs")]
    shares = [(r, math.log(r.seconds * g / (r.number("size") * r.number("gbs")))) for r, g in rows if g > 0]
    for row, value in shares:
        tp = row.number("tp")
        others = [x for r, x in shares if r is not row and (tp != tp or r.number("tp") == tp)]
        if len(others) < MIN_ROWS:
            continue
        usual = statistics.median(others)
        spread = statistics.median(abs(x - usual) for x in others)
        off = math.exp(value - usual)
        isolated = min(abs(value - x) for x in others) > math.log(ISOLATED) / 2
        if isolated and abs(value - usual) > max(8 * spread, math.log(ISOLATED)) and not factor(off):
            message = f"{plain(row.seconds)} s is {off:.2g} times what the table's other rows take for such work"
            yield finding(row, "outlier", message, f"about {plain(row.seconds / off)} s")
