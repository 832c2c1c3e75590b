"""Rules about TFLOPs and model sizes: the formula, and sizes with and without embeddings."""

import re
from collections.abc import Iterator, Mapping

from trilane.documents.lint import flops_rules
from trilane.documents.lint.finding import LintFinding, LintTable, finding, known, plain
from trilane.documents.lint.flops_rules import FORMULAS, LOOSE, Formula
from trilane.documents.markdown import TableRow

STATED = re.compile(r"Model size: (\d+(?:\.\d+)?)B")
NEAR = 0.004  # relative error of a size by rounding to billions and by the position parameters
SAME_MODEL = 5e-4  # relative: rows whose TFLOPs imply sizes this close are one model


def formulas(table: LintTable) -> Iterator[LintFinding]:
    """TFLOPs that differ from the table's formula for the numbers of the row."""
    formula = table.formula
    if not formula:
        return
    for row in table.rows:
        gpus = table.gpus(row)
        if not flops_rules.is_measured(row) or formula.agrees(row, gpus):
            continue
        value = formula.tflops(row, gpus)
        if value == value:
            wrong = _wrong(table, formula, row, value)
            # Another table's formula may not be this one's, and then is far from it, unless it explains the difference.
            near = len(table.rows) == 1 and abs(row.number("tflops") / value - 1) < LOOSE * 5
            if table.own_formula or near or " or " not in wrong.likely:
                yield wrong


def _wrong(table: LintTable, formula: Formula, row: TableRow, value: float) -> LintFinding:
    printed = row.number("tflops")
    ratio = printed / value
    near = formula.exact + flops_rules.rounding(row) + 1e-3
    time = row.cells["time"].text if row.has("time") else f"{row.seconds:g} s in the log line"
    message = f"{time} and {row.cells['tflops'].text} TFLOPs, but {formula.name} gives {value:.2f}"
    for factor, unit in ((1e3, "milliseconds"), (1e-3, "kiloseconds"), (1 / 60, "minutes")):
        # time x factor gives the printed TFLOPs: the time has another unit
        if abs(ratio / factor - 1) < near + LOOSE:
            return finding(row, "unit", f"{message}: {unit}", f"{plain(row.seconds / factor)} s")
    if abs(ratio * (1 / row.seconds) ** 2 - 1) < near or abs(ratio / row.seconds**2 - 1) < near:
        return finding(row, "unit", f"{message}: iterations per second", f"{plain(1 / row.seconds)} s")
    if abs(ratio / 1e3 - 1) < LOOSE or abs(ratio * 1e3 - 1) < LOOSE:
        return finding(row, "unit", message, f"{value:.2f} TFLOPs")
    batch, stated = row.number("gbs") * ratio, row.facts.get("gbs", 0.0)
    if stated and row.has("gbs") and abs(batch / stated - 1) < near:
        likely = f"GBS {plain(stated)}, as in the text"
        return finding(row, "formula", f"{message} for GBS {row.cells['gbs'].text}", likely)
    for other in FORMULAS:
        if other.name != formula.name and other.agrees(row, table.gpus(row)):
            message += f": computed by another formula ({other.name})"
            return finding(row, "formula", message, f"{value:.2f} TFLOPs")
    times = f", {ratio:.3g} times it" if abs(ratio - round(ratio)) < 0.002 and ratio > 1.5 else ""
    seconds = plain(row.seconds / ratio) if abs(1 / ratio - 1) > 0.01 else f"{row.seconds / ratio:.2f}"
    fits = row.has("gbs") and abs(1 / ratio - round(1 / ratio)) < near and ratio < 0.6
    instead = f", or GBS {plain(round(batch))}" if fits else ""
    return finding(row, "formula", message + times, f"{value:.2f} TFLOPs, or {seconds} s{instead}")


def sizes(table: LintTable) -> Iterator[LintFinding]:
    """Sizes that contradict layers and hidden size or, without these, the size implied by the TFLOPs."""
    shaped = [row for row in table.rows if row.has("size") and known(row, "layers", "hidden")]
    for row in shaped:
        yield from _against_shape(row, _convention(shaped, row))
    if not shaped and table.formula and table.formula.name.startswith("size x 4"):
        yield from _mixed(table)


def parameters(row: TableRow | Mapping[str, float]) -> tuple[float, float]:
    """Billions of parameters without and with embeddings: L (12 h^2 + 13 h), and + V h + s h + 2 h (document 003)."""
    get = row.number if isinstance(row, TableRow) else lambda name: row.get(name, float("nan"))
    L, h, s, V = (get(name) for name in ("layers", "hidden", "seq", "vocab"))
    V = 250_880 if V == 250_000 else V
    blocks = L * (12 * h * h + 13 * h)
    return blocks / 1e9, (blocks + (V + s + 2) * h) / 1e9


def _convention(rows: list[TableRow], row: TableRow) -> int:
    """Above 0 if the other sizes of the table include the embeddings, below 0 if not."""
    votes = 0
    for other in rows:
        if other is not row:
            blocks, whole = parameters(other)
            size, half = other.number("size"), other.cells["size"].half
            votes += (abs(size - whole) <= half * 1.2) - (abs(size - blocks) <= half * 1.2)
    return votes


def _against_shape(row: TableRow, whole: int) -> Iterator[LintFinding]:
    size, half = row.number("size"), row.cells["size"].half
    blocks, full = parameters(row)
    slack = half * 1.2 + NEAR * size
    shape = f"{plain(row.number('layers'))} layers of {plain(row.number('hidden'))}"
    if full == full and whole * (abs(size - full) - abs(size - blocks)) > 0:
        right, words = (full, "without") if whole > 0 else (blocks, "with")
        if abs(size - right) > slack >= min(abs(size - full), abs(size - blocks)):
            message = f"{row.cells['size'].text} is the size {words} embeddings, unlike that of the other rows"
            yield finding(row, "size convention", message, f"{right:.0f}B")
            return
    if full == full and abs(size - full) > slack and abs(size - blocks) > slack:
        if abs(size * 2**30 / 1e9 - full) <= slack:
            message, likely = f" counts a billion as 2^30: {shape} are {full:.1f}B", f"{full:.0f}B"
        elif any(abs(size * times / full - 1) < LOOSE for times in (1e3, 1e-3)):
            message, likely = f", but {shape} are {full:.4g}B", f"{full:.4g}B"
        else:
            message = f", but {shape} are {full:.1f}B ({blocks:.1f}B without embeddings)"
            likely = f"{full if whole >= 0 else blocks:.0f}B"
        yield finding(row, "size convention", f"{row.cells['size'].text}{message}", likely)


def _mixed(table: LintTable) -> Iterator[LintFinding]:
    """Sizes of which some equal those of the TFLOPs (blocks only), and others include the embeddings."""
    rows = [r for r in table.rows if flops_rules.is_measured(r) and r.has("size") and known(r, "seq", "gbs", "size")]
    implied = [(r, flops_rules.implied_size(r, table.gpus(r))) for r in rows]
    implied = [(r, n) for r, n in implied if n > 0 and abs(r.number("size") / n - 1) < LOOSE]
    ratios = [(r.number("size") / n, r.cells["size"].half / n) for r, n in implied]
    larger = sorted(ratio for ratio, half in ratios if ratio - 1 > half + 2 * NEAR)
    if not larger:
        return
    usual = larger[len(larger) // 2]
    for row, size in implied:
        if abs(row.number("size") / size - 1) <= row.cells["size"].half / size + NEAR / 4:
            text = row.cells["size"].text
            one = [r for r, n in implied if abs(n / size - 1) < SAME_MODEL and r.cells["size"].text != text]
            with_it = f"; line {one[0].line} calls the same model {one[0].cells['size'].text}" if one else ""
            message = f"{text} is the size without embeddings, other rows count them{with_it}"
            yield finding(row, "size convention", message, one[0].cells["size"].text if one else f"{size * usual:.0f}B")


def stated(line: int, text: str, facts: Mapping[str, float]) -> Iterator[LintFinding]:
    """A `Model size: 310B` in the text that contradicts the shape above it."""
    if found := STATED.search(text):
        blocks, full = parameters(facts)
        size = float(found[1])
        slack = 0.5 * 1.2 + NEAR * size
        if full == full and abs(size - full) > slack and abs(size - blocks) > slack:
            shape = f"{plain(facts['layers'])} layers of {plain(facts['hidden'])}"
            message = f"{found[0]}, but {shape} are {full:.0f}B"
            yield LintFinding(line=line, row=0, rule="size convention", message=message, likely=f"{full:.0f}B")
