"""Products: sizes of the machine, of the batch and of the model that must multiply up; columns that were swapped."""

import math
import statistics
from collections.abc import Iterator, Sequence

from trilane.documents.lint.finding import LintFinding, Sheet, alike, finding, known, plain
from trilane.documents.lint.flops_rules import both
from trilane.documents.markdown import HandRow

SAME = 1e-3  # as a share: a time printed as TFLOPs elsewhere, and not by accident
FAR = 1.0  # natural logarithm: time and TFLOPs together, from those of the other rows
FEWEST = 3  # other rows that tell what is usual


def products(sheet: Sheet) -> Iterator[LintFinding]:
    """GPUs = TP x PP x DP (x CP) = nodes x GPUs per node; GBS = MBS x microbatches x DP.

    Layers divide over PP, heads over TP.
    """
    for row in sheet.rows:
        yield from _gpus(sheet, row)
        yield from _batch(row)
        yield from _layers(row)


def _gpus(sheet: Sheet, row: HandRow) -> Iterator[LintFinding]:
    gpus = sheet.gpus(row)
    nodes, node = row.number("nodes"), sheet.node(row)
    if row.has("gpus") and row.has("nodes") and node and nodes * node != gpus:
        said = f"{plain(nodes)} nodes x {plain(node)} GPUs are not {plain(gpus)} GPUs"
        yield finding(row, "product", said, _right_machine(row, node))
        return
    without_pipeline = not any(known(r, "pp") for r in sheet.rows)
    if not known(row, "dp", "tp") or not (known(row, "pp") or without_pipeline) or not gpus > 0 or _swapped(sheet, row):
        return
    dp, tp = row.number("dp"), row.number("tp")
    pp, cp = 1.0 if without_pipeline else row.number("pp"), context(row)
    if dp * tp * pp * cp == gpus:
        return
    words = f"DP {plain(dp)} x TP {plain(tp)} x PP {plain(pp)}" + (f" x CP {plain(cp)}" if cp > 1 else "")
    said = f"{words} = {plain(dp * tp * pp * cp)}, but {plain(gpus)} GPUs"
    yield finding(row, "product", said, _right_product(sheet, gpus, dp, tp, pp, cp))


def context(row: HandRow) -> float:
    """Context parallelism, 1 where no column tells: it multiplies the GPUs, as expert parallelism does not."""
    return row.number("cp") if known(row, "cp") else 1.0


def _right_machine(row: HandRow, node: float) -> str:
    nodes, gpus = row.number("nodes"), row.number("gpus")
    product = row.number("dp") * row.number("tp") * row.number("pp") * context(row)
    return f"nodes {plain(gpus / node)}" if product == gpus else f"GPUs {plain(nodes * node)}"


def _right_product(sheet: Sheet, gpus: float, dp: float, tp: float, pp: float, cp: float) -> str:
    # DP is what is derived, so it is the first to blame; a PP too large for the GPUs was clamped in silence
    for name, value in (("DP", gpus / (tp * pp * cp)), ("PP", gpus / (tp * dp * cp)), ("TP", gpus / (dp * pp * cp))):
        if value >= 1 and value == int(value) and (name != "TP" or value <= sheet.gpus_per_node):
            return f"{name} {plain(value)}"
    return f"GPUs {plain(dp * tp * pp * cp)}"


def _batch(row: HandRow) -> Iterator[LintFinding]:
    if not (row.has("gbs") and row.has("mbs") and known(row, "dp", "mbs", "gbs")):
        return
    mbs, gbs, dp = row.number("mbs"), row.number("gbs"), row.number("dp")
    if mbs > gbs:
        return  # swapped
    if row.has("chunks") and known(row, "chunks"):
        product = mbs * row.number("chunks") * dp
        if product != gbs:
            said = (
                f"MBS {plain(mbs)} x {plain(row.number('chunks'))} microbatches x DP {plain(dp)} = {plain(product)}, "
            )
            yield finding(row, "product", f"{said}but GBS {plain(gbs)}", f"GBS {plain(product)}")
    elif gbs % (mbs * dp):
        said = f"GBS {plain(gbs)} is no multiple of MBS {plain(mbs)} x DP {plain(dp)}"
        yield finding(row, "product", said, f"GBS {plain(max(1, round(gbs / (mbs * dp))) * mbs * dp)}")


def _layers(row: HandRow) -> Iterator[LintFinding]:
    if known(row, "layers", "pp"):
        L, pp = row.number("layers"), row.number("pp")
        if L % pp and (L + 2) % pp:  # the embeddings may count as a layer each
            said = f"{plain(L)} layers do not divide over PP {plain(pp)}: uneven stages"
            less = math.floor(L / pp) * pp
            yield finding(
                row, "product", said, f"layers {plain(less)} or {plain(less + pp)}" if less else f"PP {plain(L)}"
            )
    if row.has("heads") and known(row, "heads", "tp") and row.number("heads") % row.number("tp"):
        said = f"{plain(row.number('heads'))} heads do not divide over TP {plain(row.number('tp'))}"
        yield finding(row, "product", said, "another number of heads")


def _swapped(sheet: Sheet, row: HandRow) -> str:
    """Whether TP is no size of a node, and another column holds the TP that all other rows have."""
    tp, node = row.number("tp"), sheet.node(row)
    if not row.has("tp") or not node or (tp <= node and node % tp == 0) or tp == sheet.usual_tp:
        return ""
    return next((n for n in ("pp", "dp") if row.has(n) and row.number(n) == sheet.usual_tp), "")


def swaps(sheet: Sheet) -> Iterator[LintFinding]:
    """Two columns of a row in each other's place: TP and PP or DP, MBS and GBS, layers and hidden, time and TFLOPs."""
    for row in sheet.rows:
        if other := _swapped(sheet, row):
            tp, value = plain(row.number("tp")), plain(row.number(other))
            said = f"TP {tp} does not fit into nodes of {plain(sheet.node(row))} GPUs, {other.upper()} {value} would"
            yield finding(row, "swap", said, f"TP {value}, {other.upper()} {tp}")
        for small, large in (("mbs", "gbs"), ("layers", "hidden")):
            if row.has(small) and row.has(large) and row.number(small) > row.number(large) > 0:
                a, b = plain(row.number(small)), plain(row.number(large))
                said = f"{small.upper()} {a} is above {large.upper()} {b}"
                yield finding(row, "swap", said, f"{small.upper()} {b}, {large.upper()} {a}")
        yield from _time_and_rate(sheet, row)


def _time_and_rate(sheet: Sheet, row: HandRow) -> Iterator[LintFinding]:
    """No formula sees this swap: time x TFLOPs stays the same. Another row of the configuration does, or all others."""
    if not both(row):
        return
    time, rate = row.seconds, row.number("tflops")
    likely = f"{rate:g} s, {time:g} TFLOPs"
    if abs(time / rate - 1) < SAME:
        return
    for other in sheet.others:
        if other is not row and both(other) and alike(row, other):
            reverse = abs(other.seconds / rate - 1) < SAME and abs(other.number("tflops") / time - 1) < SAME
            if reverse and _gain(sheet, row) > _gain(sheet, other):
                said = (
                    f"time and TFLOPs: line {other.line} has {other.seconds:g} s and {other.number('tflops'):g} TFLOPs"
                )
                yield finding(row, "swap", said, likely)
                return
    rows = _beside(sheet.rows, row)
    if len(rows) >= FEWEST:
        usual, rates = (statistics.median(v) for v in ([r.seconds for r in rows], [r.number("tflops") for r in rows]))
        now = abs(math.log(time / usual)) + abs(math.log(rate / rates))
        then = abs(math.log(rate / usual)) + abs(math.log(time / rates))
        if now > FAR and then < now / 4:
            said = f"time {time:g} and TFLOPs {rate:g}; other rows have about {plain(usual)} and {plain(rates)}"
            yield finding(row, "swap", said, likely)


def _beside(rows: Sequence[HandRow], row: HandRow) -> list[HandRow]:
    """The other rows of its table that print both, and have its TP where it tells one."""
    tp = row.number("tp")
    mates = [r for r in rows if r is not row and r.table == row.table and both(r)]
    return [r for r in mates if tp != tp or r.number("tp") == tp]


def _gain(sheet: Sheet, row: HandRow) -> float:
    """How much nearer to its table's other rows the row comes when its time and TFLOPs change places."""
    beside = _beside(sheet.others, row)
    if not beside:
        return 0.0
    usual = statistics.median(r.seconds for r in beside)
    return abs(math.log(row.seconds / usual)) - abs(math.log(row.number("tflops") / usual))
