"""Rules of the linter about TFLOPs and model sizes: the formula, and sizes with and without embeddings."""

import re
from collections.abc import Iterator, Mapping

from trilane.documents.lint import flops_rules
from trilane.documents.lint.finding import LintFinding, Sheet, finding, known, plain
from trilane.documents.lint.flops_rules import FORMULAS, LOOSE, Formula
from trilane.documents.markdown import HandRow

STATED = re.compile(r"Model size: (\d+(?:\.\d+)?)B")
NEAR = 0.004  # of a size: what rounding to whole billions and the positions' parameters leave open
SAME_MODEL = 5e-4  # two rows whose TFLOPs give sizes nearer than this are one model


def formulas(sheet: Sheet) -> Iterator[LintFinding]:
    """TFLOPs that are not what the table's formula makes of the row's numbers."""
    formula = sheet.formula
    if not formula:
        return
    for row in sheet.rows:
        gpus = sheet.gpus(row)
        if not flops_rules.both(row) or formula.agrees(row, gpus):
            continue
        value = formula.tflops(row, gpus)
        if value == value:
            yield _wrong(sheet, formula, row, value)


def _wrong(sheet: Sheet, formula: Formula, row: HandRow, value: float) -> LintFinding:
    printed = row.number("tflops")
    ratio = printed / value
    near = formula.exact + flops_rules.rounding(row) + 1e-3
    time = row.cells["time"].text if row.has("time") else f"{row.seconds:g} s in the log line"
    says = f"{time} and {row.cells['tflops'].text} TFLOPs, but {formula.name} gives {value:.2f}"
    for factor, unit in ((1e3, "milliseconds"), (1e-3, "kiloseconds"), (1 / 60, "minutes")):
        # time x factor makes the TFLOPs come out right: the time stands in another unit
        if abs(ratio / factor - 1) < near + LOOSE:
            return finding(row, "unit", f"{says}: {unit}", f"{plain(row.seconds / factor)} s")
    if abs(ratio * (1 / row.seconds) ** 2 - 1) < near or abs(ratio / row.seconds**2 - 1) < near:
        return finding(row, "unit", f"{says}: iterations per second", f"{plain(1 / row.seconds)} s")
    if abs(ratio / 1e3 - 1) < LOOSE or abs(ratio * 1e3 - 1) < LOOSE:
        return finding(row, "unit", says, f"{value:.2f} TFLOPs")
    told = row.facts.get("gbs", 0.0)
    for gbs in (told, row.number("gbs") * ratio):
        # a batch that the text says, or a simple share of the printed one
        if gbs and abs(row.number("gbs") * ratio / gbs - 1) < near and gbs == told and row.has("gbs"):
            likely = f"GBS {plain(gbs)}, as the text says"
            return finding(row, "formula", f"{says} for GBS {row.cells['gbs'].text}", likely)
    for other in FORMULAS:
        if other.name != formula.name and other.agrees(row, sheet.gpus(row)):
            return finding(row, "formula", f"{says}: computed by another formula ({other.name})", f"{value:.2f} TFLOPs")
    times = f", {ratio:.3g} times it" if abs(ratio - round(ratio)) < 0.002 and ratio > 1.5 else ""
    seconds = plain(row.seconds / ratio) if abs(1 / ratio - 1) > 0.01 else f"{row.seconds / ratio:.2f}"
    batch = row.number("gbs") * ratio
    fits = row.has("gbs") and abs(1 / ratio - round(1 / ratio)) < near and ratio < 0.6
    instead = f", or GBS {plain(round(batch))}" if fits else ""
    return finding(row, "formula", says + times, f"{value:.2f} TFLOPs, or {seconds} s{instead}")


def sizes(sheet: Sheet) -> Iterator[LintFinding]:
    """Sizes against layers and hidden size; without these, against the size that the TFLOPs were computed with."""
    shaped = [row for row in sheet.rows if row.has("size") and known(row, "layers", "hidden")]
    for row in shaped:
        yield from _against_shape(row, _whole(shaped, row))
    if not shaped and sheet.formula and sheet.formula.name.startswith("size x 4"):
        yield from _mixed(sheet)


def parameters(row: HandRow | Mapping[str, float]) -> tuple[float, float]:
    """Billions of parameters without and with embeddings: L (12 h^2 + 13 h), and + V h + s h + 2 h (document 003)."""
    get = row.number if isinstance(row, HandRow) else lambda name: row.get(name, float("nan"))
    L, h, s, V = (get(name) for name in ("layers", "hidden", "seq", "vocab"))
    V = 250_880 if V == 250_000 else V
    blocks = L * (12 * h * h + 13 * h)
    return blocks / 1e9, (blocks + (V + s + 2) * h) / 1e9


def _whole(rows: list[HandRow], row: HandRow) -> int:
    """Above 0 where the table's other sizes count the embeddings, below where they do not."""
    votes = 0
    for other in rows:
        if other is not row:
            blocks, whole = parameters(other)
            size, half = other.number("size"), other.cells["size"].half
            votes += (abs(size - whole) <= half * 1.2) - (abs(size - blocks) <= half * 1.2)
    return votes


def _against_shape(row: HandRow, whole: int) -> Iterator[LintFinding]:
    size, half = row.number("size"), row.cells["size"].half
    blocks, full = parameters(row)
    slack = half * 1.2 + NEAR * size
    shape = f"{plain(row.number('layers'))} layers of {plain(row.number('hidden'))}"
    if full == full and whole * (abs(size - full) - abs(size - blocks)) > 0:
        right, words = (full, "without") if whole > 0 else (blocks, "with")
        if abs(size - right) > slack >= min(abs(size - full), abs(size - blocks)):
            says = f"{row.cells['size'].text} is the size {words} embeddings, unlike that of the other rows"
            yield finding(row, "size convention", says, f"{right:.0f}B")
            return
    if full == full and abs(size - full) > slack and abs(size - blocks) > slack:
        if abs(size * 2**30 / 1e9 - full) <= slack:
            says = f"{row.cells['size'].text} counts a billion as 2^30: {shape} are {full:.1f}B"
            yield finding(row, "size convention", says, f"{full:.0f}B")
            return
        if any(abs(size * times / full - 1) < LOOSE for times in (1e3, 1e-3)):
            says = f"{row.cells['size'].text}, but {shape} are {full:.4g}B"
            yield finding(row, "size convention", says, f"{full:.4g}B")
            return
        says = f"{row.cells['size'].text}, but {shape} are {full:.1f}B ({blocks:.1f}B without embeddings)"
        yield finding(row, "size convention", says, f"{full if whole >= 0 else blocks:.0f}B")


def _mixed(sheet: Sheet) -> Iterator[LintFinding]:
    """Sizes of which some are those of the TFLOPs (blocks alone), others larger by a vocabulary's embeddings."""
    rows = [r for r in sheet.rows if flops_rules.both(r) and r.has("size") and known(r, "seq", "gbs", "size")]
    told = [(r, flops_rules.inverted(r, sheet.gpus(r))) for r in rows]
    told = [(r, n) for r, n in told if n > 0 and abs(r.number("size") / n - 1) < LOOSE]
    larger = [r.number("size") / n for r, n in told if r.number("size") / n - 1 > r.cells["size"].half / n + 2 * NEAR]
    if not larger:
        return
    usual = sorted(larger)[len(larger) // 2]
    for row, size in told:
        if abs(row.number("size") / size - 1) <= row.cells["size"].half / size + NEAR / 4:
            one = [
                r for r, n in told if abs(n / size - 1) < SAME_MODEL and r.cells["size"].text != row.cells["size"].text
            ]
            with_it = f"; line {one[0].line} calls the same model {one[0].cells['size'].text}" if one else ""
            says = f"{row.cells['size'].text} is the size without embeddings, other rows count them{with_it}"
            yield finding(row, "size convention", says, one[0].cells["size"].text if one else f"{size * usual:.0f}B")


def stated(line: int, text: str, facts: Mapping[str, float]) -> Iterator[LintFinding]:
    """A `Model size: 310B` in the text against the shape that stands above it."""
    if found := STATED.search(text):
        blocks, full = parameters(facts)
        size = float(found[1])
        slack = 0.5 * 1.2 + NEAR * size
        if full == full and abs(size - full) > slack and abs(size - blocks) > slack:
            shape = f"{plain(facts['layers'])} layers of {plain(facts['hidden'])}"
            says = f"{found[0]}, but {shape} are {full:.0f}B"
            yield LintFinding(line=line, row=0, rule="size convention", says=says, likely=f"{full:.0f}B")
