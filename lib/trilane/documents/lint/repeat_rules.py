"""Repeats and outliers: one configuration with two results; memory and times that their neighbours contradict."""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from trilane.documents.lint.finding import LintFinding, Sheet, finding, key, known, plain
from trilane.documents.lint.unit_rules import factor
from trilane.documents.markdown import HandRow

ANOTHER_DAY = 0.05  # by how much the time of one configuration may differ between two days
SLOWER = 0.15  # by how much a row may miss the time that its batch predicts from another row's
MORE = 0.05  # by how much memory may fall as the microbatch grows: readings are rounded
FEWEST = 3  # other rows that tell what is usual
ALONE = 1.6  # times the others' time for such work: an outlier, if no other row comes near


def duplicates(sheet: Sheet) -> Iterator[LintFinding]:
    """One configuration twice in a table: the same line again, or other results; a repeat on another day may differ."""
    seen: dict[tuple, list[HandRow]] = {}
    for row in sheet.rows:
        if row.seconds == row.seconds and len(key(row)) >= 3:
            seen.setdefault(key(row), []).append(row)
    for rows in seen.values():
        if len(rows) < 2:
            continue
        middle = statistics.median_low(r.seconds for r in rows)
        first = next(r for r in rows if r.seconds == middle) if len(rows) > 2 else rows[0]
        for row in rows:
            if row is not first and _contradicts(row, first):
                yield _duplicate(row, first, rows)


def _contradicts(row: HandRow, first: HandRow) -> bool:
    days = [r.cells["notes"].text if "notes" in r.cells else "" for r in (row, first)]
    return days[0] == days[1] or abs(row.seconds / first.seconds - 1) > ANOTHER_DAY


def _duplicate(row: HandRow, first: HandRow, rows: Sequence[HandRow]) -> LintFinding:
    if row.seconds == first.seconds:
        return finding(row, "duplicate", f"the configuration and the time of line {first.line} again", "one of the two")
    times = ", ".join(plain(r.seconds) for r in rows)
    memory = [r.memory_gb for r in rows]
    more = f", {', '.join(plain(m) for m in memory)} GB" if all(m == m for m in memory) and len(set(memory)) > 1 else ""
    likely = f"{plain(first.seconds)} s" if len(rows) > 2 else "another MBS in one of the two, or one slow run"
    lines = " and ".join(str(r.line) for r in rows if r is not row)
    return finding(row, "duplicate", f"the configuration of line {lines} with other results: {times} s{more}", likely)


def outliers(sheet: Sheet) -> Iterator[LintFinding]:
    """Memory that falls as the microbatch grows; a time that another row's, scaled by the batch, contradicts."""
    yield from _memory(sheet)
    yield from _time(sheet)
    yield from _lonely(sheet)


def _groups(rows: Sequence[HandRow], name: str) -> Iterator[list[HandRow]]:
    """Rows that differ in one column only, in its order."""
    groups: dict[tuple, list[HandRow]] = {}
    for row in rows:
        if row.has(name):
            groups.setdefault(tuple(k for k in key(row) if k[0] not in (name, "chunks")), []).append(row)
    for group in groups.values():
        if len(group) > 1:
            yield sorted(group, key=lambda r: r.number(name))


def _memory(sheet: Sheet) -> Iterator[LintFinding]:
    for group in _groups([r for r in sheet.rows if r.has("mem") and known(r, "mem")], "mbs"):
        for less, more in pairwise(group):
            if less.number("mbs") < more.number("mbs") and less.memory_gb > more.memory_gb * (1 + MORE):
                a, b = plain(less.memory_gb), plain(more.memory_gb)
                said = f"{a} GB at MBS {plain(less.number('mbs'))}, but {b} GB at MBS {plain(more.number('mbs'))}"
                yield finding(less, "outlier", f"{said} (line {more.line})", f"under {b} GB, such as {_digits(a, b)}")


def _digits(high: str, low: str) -> str:
    """The likely reading: of all numbers that one other digit makes of `high` the one nearest to 0.8 x `low`, by which
    the rows of the chronicles fall on average as the microbatch halves."""
    made = [high[:i] + d + high[i + 1 :] for i in range(len(high)) for d in "0123456789" if high[i].isdigit()]
    below = [text for text in made if float(low) * 0.6 < float(text) < float(low)]
    right = min(below, key=lambda text: abs(float(text) - 0.8 * float(low)), default=plain(float(low) * 0.8))
    return f"{right} GB"


def _time(sheet: Sheet) -> Iterator[LintFinding]:
    """A pipeline takes (microbatches + PP - 1) steps (2104.04473, section 2.2); fixed parts slow small batches more."""
    timed = [r for r in sheet.rows if r.seconds == r.seconds and known(r, "dp", "mbs", "gbs")]
    for group in _groups(timed, "gbs"):
        scaled = []
        for row in group:
            steps = row.number("gbs") / (row.number("dp") * row.number("mbs"))
            scaled.append(row.seconds / (steps + (row.number("pp") if known(row, "pp") else 1) - 1))
        usual = min(scaled) if len(scaled) == 2 else statistics.median(scaled)
        for row, value in zip(group, scaled, strict=True):
            if value > usual * (1 + SLOWER) and not factor(value / usual):
                said = (
                    f"{plain(row.seconds)} s for GBS {plain(row.number('gbs'))} is {value / usual - 1:.0%} above what"
                )
                yield finding(
                    row,
                    "outlier",
                    f"{said} the rows with another GBS predict",
                    f"{plain(row.seconds * usual / value)} s",
                )


def _lonely(sheet: Sheet) -> Iterator[LintFinding]:
    """A time per unit of work far from that of all other rows with the same TP, and near to none of them."""
    rows = [(r, sheet.gpus(r)) for r in sheet.rows if r.seconds == r.seconds and known(r, "size", "gbs")]
    shares = [(r, math.log(r.seconds * g / (r.number("size") * r.number("gbs")))) for r, g in rows if g > 0]
    for row, value in shares:
        tp = row.number("tp")
        others = [x for r, x in shares if r is not row and (tp != tp or r.number("tp") == tp)]
        if len(others) < FEWEST:
            continue
        usual = statistics.median(others)
        spread = statistics.median(abs(x - usual) for x in others)
        off = math.exp(value - usual)
        alone = min(abs(value - x) for x in others) > math.log(ALONE) / 2
        if alone and abs(value - usual) > max(8 * spread, math.log(ALONE)) and not factor(off):
            said = f"{plain(row.seconds)} s is {off:.2g} times what the table's other rows take for such work"
            yield finding(row, "outlier", said, f"about {plain(row.seconds / off)} s")
