"""Rules about products of machine, batch and model sizes, and about swapped columns."""

import math
import re
import statistics
from collections.abc import Iterator, Sequence

from trilane.documents.lint.finding import LintFinding, LintTable, finding, known, plain, same_configuration
from trilane.documents.lint.flops_rules import is_measured
from trilane.documents.markdown import TableRow

SAME = 1e-3  # relative: a time that equals the TFLOPs of another row
FAR = 1.0  # sum of |ln| of time and TFLOPs over those of the other rows
PARALLEL = re.compile(r"sdp|ulysses|shard|replic|parallel|\b(?:[emsu]|et|us)p\b")  # names of columns
MIN_ROWS = 3  # other rows needed for a usual value


def products(table: LintTable) -> Iterator[LintFinding]:
    """GPUs = TP x PP x DP (x CP) = nodes x GPUs per node; GBS = MBS x microbatches x DP; PP | layers and TP | heads."""
    for rule in (_gpus, _batch):
        found = [list(rule(table, row)) for row in table.rows]
        tested = sum(1 for row in table.rows if known(row, "dp", *(("mbs", "gbs") if rule is _batch else ("tp",))))
        if tested < MIN_ROWS or sum(map(bool, found)) < tested:  # else a column means something else
            yield from (one for row in found for one in row)
    for row in table.rows:
        yield from _layers(row)


def _gpus(table: LintTable, row: TableRow) -> Iterator[LintFinding]:
    gpus = table.gpus(row)
    nodes, node = row.number("nodes"), table.node(row)
    shared = nodes == 1 and gpus < node
    if row.has("gpus") and row.has("nodes") and node and nodes * node != gpus and not shared:
        message = f"{plain(nodes)} nodes x {plain(node)} GPUs are not {plain(gpus)} GPUs"
        yield finding(row, "product", message, _right_machine(row, node))
        return
    without_pipeline = not any(known(r, "pp") for r in table.rows)
    if not known(row, "dp", "tp") or not (known(row, "pp") or without_pipeline) or not gpus > 0 or _swapped(table, row):
        return
    dp, tp = row.number("dp"), row.number("tp")
    pp, cp = 1.0 if without_pipeline else row.number("pp"), context(row)
    part = not row.has("gpus") and nodes == 1 and dp * tp * pp * cp < gpus  # of one node
    if part or dp * tp * pp * cp == gpus or (_other_parallelism(row) and not _some_product(table)):
        return
    words = f"DP {plain(dp)} x TP {plain(tp)} x PP {plain(pp)}" + (f" x CP {plain(cp)}" if cp > 1 else "")
    message = f"{words} = {plain(dp * tp * pp * cp)}, but {plain(gpus)} GPUs"
    yield finding(row, "product", message, _right_product(table, gpus, dp, tp, pp, cp))


def _other_parallelism(row: TableRow) -> bool:
    """Whether an unknown column may multiply the GPUs too, such as FSDP besides DP."""
    return any(name.startswith(":") and PARALLEL.search(name.lower()) for name in row.cells)


def _some_product(table: LintTable) -> bool:
    """Whether the GPUs of most rows are the product of the known columns."""
    rows = [r for r in table.rows if known(r, "dp", "tp") and table.gpus(r) > 0]
    right = [r.number("dp") * r.number("tp") * (r.number("pp") if known(r, "pp") else 1.0) * context(r) for r in rows]
    return 2 * sum(value == table.gpus(r) for value, r in zip(right, rows, strict=True)) >= len(rows)


def context(row: TableRow) -> float:
    """Context parallelism, 1 if no column has it; unlike expert parallelism, it multiplies the GPUs."""
    return row.number("cp") if known(row, "cp") else 1.0


def _right_machine(row: TableRow, node: float) -> str:
    nodes, gpus = row.number("nodes"), row.number("gpus")
    product = row.number("dp") * row.number("tp") * row.number("pp") * context(row)
    return f"nodes {plain(gpus / node)}" if product == gpus else f"GPUs {plain(nodes * node)}"


def _right_product(table: LintTable, gpus: float, dp: float, tp: float, pp: float, cp: float) -> str:
    # DP is derived, so it is the first suspect; a PP too large for the GPUs was clamped silently
    for name, value in (("DP", gpus / (tp * pp * cp)), ("PP", gpus / (tp * dp * cp)), ("TP", gpus / (dp * pp * cp))):
        if value >= 1 and value == int(value) and (name != "TP" or value <= table.gpus_per_node):
            return f"{name} {plain(value)}"
    return f"GPUs {plain(dp * tp * pp * cp)}"


def _batch(table: LintTable, row: TableRow) -> Iterator[LintFinding]:
    if not (row.has("gbs") and row.has("mbs") and known(row, "dp", "mbs", "gbs")):
        return
    mbs, gbs, dp = row.number("mbs"), row.number("gbs"), row.number("dp")
    if mbs > gbs:
        return  # swapped
    if row.has("chunks") and known(row, "chunks"):
        product = mbs * row.number("chunks") * dp
        if product != gbs:
            factors = f"MBS {plain(mbs)} x {plain(row.number('chunks'))} microbatches x DP {plain(dp)}"
            message = f"{factors} = {plain(product)}, but GBS {plain(gbs)}"
            yield finding(row, "product", message, f"GBS {plain(product)}")
    elif gbs % (mbs * dp):
        message = f"GBS {plain(gbs)} is no multiple of MBS {plain(mbs)} x DP {plain(dp)}"
        yield finding(row, "product", message, f"GBS {plain(max(1, round(gbs / (mbs * dp))) * mbs * dp)}")


def _layers(row: TableRow) -> Iterator[LintFinding]:
    if known(row, "layers", "pp"):
        L, pp = row.number("layers"), row.number("pp")
        if L % pp and (L + 2) % pp:  # the embeddings may count as a layer each
            message = f"{plain(L)} layers do not divide over PP {plain(pp)}: uneven stages"
            less = math.floor(L / pp) * pp
            likely = f"layers {plain(less)} or {plain(less + pp)}" if less else f"PP {plain(L)}"
            yield finding(row, "product", message, likely)
    if row.has("heads") and known(row, "heads", "tp") and row.number("heads") % row.number("tp"):
        message = f"{plain(row.number('heads'))} heads do not divide over TP {plain(row.number('tp'))}"
        yield finding(row, "product", message, "another number of heads")


def _swapped(table: LintTable, row: TableRow) -> str:
    """The column that holds the usual TP where TP does not fit into a node; "" if they were not swapped."""
    tp, node = row.number("tp"), table.node(row)
    if not row.has("tp") or not node or (tp <= node and node % tp == 0) or tp == table.usual_tp:
        return ""
    tps = [r.number("tp") for r in table.rows if r.has("tp")]
    if 2 * tps.count(table.usual_tp) < len(tps):  # TP itself is varied here
        return ""
    return next((n for n in ("pp", "dp") if row.has(n) and row.number(n) == table.usual_tp), "")


def swaps(table: LintTable) -> Iterator[LintFinding]:
    """Swapped columns: TP and PP or DP, MBS and GBS, layers and hidden size, time and TFLOPs."""
    for row in table.rows:
        if other := _swapped(table, row):
            tp, value = plain(row.number("tp")), plain(row.number(other))
            message = f"TP {tp} does not fit into nodes of {plain(table.node(row))} GPUs, {other.upper()} {value} would"
            yield finding(row, "swap", message, f"TP {value}, {other.upper()} {tp}")
        for small, large in (("mbs", "gbs"), ("layers", "hidden")):
            if row.has(small) and row.has(large) and row.number(small) > row.number(large) > 0:
                a, b = plain(row.number(small)), plain(row.number(large))
                message = f"{small.upper()} {a} is above {large.upper()} {b}"
                yield finding(row, "swap", message, f"{small.upper()} {b}, {large.upper()} {a}")
        yield from _time_and_rate(table, row)


def _time_and_rate(table: LintTable, row: TableRow) -> Iterator[LintFinding]:
    """Found by comparison with other rows, as no formula shows it: time x TFLOPs stays the same."""
    if not is_measured(row):
        return
    time, rate = row.seconds, row.number("tflops")
    likely = f"{rate:g} s, {time:g} TFLOPs"
    if abs(time / rate - 1) < SAME:
        return
    for other in table.others:
        if other is not row and is_measured(other) and same_configuration(row, other):
            reverse = abs(other.seconds / rate - 1) < SAME and abs(other.number("tflops") / time - 1) < SAME
            if reverse and _gain(table, row) > _gain(table, other):
                values = f"{other.seconds:g} s and {other.number('tflops'):g} TFLOPs"
                message = f"time and TFLOPs: line {other.line} has {values}"
                yield finding(row, "swap", message, likely)
                return
    rows = _peers(table.rows, row)
    if len(rows) >= MIN_ROWS:
        usual, rates = (statistics.median(v) for v in ([r.seconds for r in rows], [r.number("tflops") for r in rows]))
        now = abs(math.log(time / usual)) + abs(math.log(rate / rates))
        then = abs(math.log(rate / usual)) + abs(math.log(time / rates))
        if now > FAR and then < now / 4:
            message = f"time {time:g} and TFLOPs {rate:g}; other rows have about {plain(usual)} and {plain(rates)}"
            yield finding(row, "swap", message, likely)


def _peers(rows: Sequence[TableRow], row: TableRow) -> list[TableRow]:
    """The other measured rows of its table, with the same TP if it has one."""
    tp = row.number("tp")
    peers = [r for r in rows if r is not row and r.table == row.table and is_measured(r)]
    return [r for r in peers if tp != tp or r.number("tp") == tp]


def _gain(table: LintTable, row: TableRow) -> float:
    """How much closer to the other rows of its table the row is with time and TFLOPs swapped."""
    peers = _peers(table.others, row)
    if not peers:
        return 0.0
    usual = statistics.median(r.seconds for r in peers)
    return abs(math.log(row.seconds / usual)) - abs(math.log(row.number("tflops") / usual))
