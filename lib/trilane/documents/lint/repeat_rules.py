"""Rules about repeats and outliers: a configuration with two results; memory and times unlike those of other rows."""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from trilane.documents.lint.finding import LintFinding, LintTable, configuration, finding, known, plain
from trilane.documents.lint.unit_rules import factor
from trilane.documents.markdown import TableRow

DAY_TO_DAY = 0.05  # relative difference in time that one configuration may have between two days
SLOWER = 0.15  # relative excess over the time predicted from rows with another batch
MORE = 0.05  # relative drop of memory as the microbatch grows: readings are rounded
MIN_ROWS = 3  # other rows needed for a usual value
ISOLATED = 1.6  # factor between the times per work of an outlier and of other rows


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
            if value > usual * (1 + SLOWER) and not factor(value / usual):
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
