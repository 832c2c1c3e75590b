"""Rules about the prose around tables: arithmetic that is stated there, and one size in two units."""

import ast
import math
import operator as op
import re
from collections.abc import Iterator

from trilane.documents.lint.finding import LintFinding, plain

LONGEST = 20_000  # characters of a line that are read

# 1_024 and 1,024 and 7.3 and 1e9
DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,6}(?:\.\d{1,12})?(?![\d,])|\d[\d_]{0,20}(?:\.\d{1,12})?(?:[eE][+-]?\d{1,3})?)"
SIGN = r"(?:\s{0,2}(?:\*\*|[*/×÷·+−])\s{0,2}|\s{1,2}[x-]\s{1,2}|x(?=\d))"
SAME = {"×": "*", "·": "*", "x": "*", "÷": "/", "−": "-"}
SIGNS = {ast.Add: op.add, ast.Sub: op.sub, ast.Mult: op.mul, ast.Div: op.truediv, ast.Pow: op.pow}
UNIT = "TiB|TB|GiB|GB|MiB|MB|KiB|KB|bytes|TFLOPs|TFLOPS|billion|million|[TBMKG]|days?|hours?|minutes|ms|s|%"
NOUN = (
    r"(?:\s(?:GPUs?|gpus?|TPUs?|chips|cards|nodes?|hosts|ranks|workers|devices|replicas|params|parameters|bytes|layers|heads"
    r"|stages|experts|tokens|sequences|samples|images|steps|microbatches|epochs)(?!\w))?"
)
OPERAND = rf"{DIGITS}(?:\s?(?:{UNIT})(?!\w))?{NOUN}"
SUM = rf"\(?{OPERAND}(?:{SIGN}\(?{OPERAND}\)?){{1,12}}"
TOKEN = re.compile(rf"\s*(?:({DIGITS})(?:\s?({UNIT})(?!\w))?{NOUN}|(\*\*|[*/×÷·+−x()-]))")
ROUGH = r"~|≈|about |approx\.? |ca\.? "

# What makes an expression part of a longer one, before it and behind it.
BEFORE = re.compile(r"(?:[*/×÷·+^<>%−-]|\d\s?x|\b[a-zA-Z]\s?[x-])\s{0,3}`?\(?$")
AFTER = r"(?![\w(\[^]|[.,:]\d|\s?-\d|\s?(?:[*×/^÷+]|x(?=[\s\d]))\s?[\w($])"

# `6*7.3` = ~33.9GB, and 14336 = 2**11*7: numbers only, and their stated value
STATED = re.compile(
    rf"(?<![\w.,$^)\]}}\\])({SUM})`?\s?(~?≈|~=|==?|~)\s?`?({ROUGH})?({DIGITS})(?:\s?({UNIT})(?!\w))?{AFTER}"
)
TURNED = re.compile(rf"(?<![\w.,$^)\]}}\\*/])({DIGITS})`?\s?(==?)\s?`?({SUM}){AFTER}")
LINK = re.compile(r"https?://\S{1,2000}|\]\([^)]{0,2000}\)|<[^>]{0,400}>|\$[^$]{1,400}\$")

# Factors between a number and the same one in another unit: the unit of an operand may stand elsewhere in the sentence.
THOUSANDS = tuple(base**power for base in (1e3, 1024.0) for power in range(-4, 5))
PREFIXES = tuple(1e3**power * 1.024**binary for power in range(-4, 5) for binary in range(-4, 5))  # K is 1000 or 1024
CLOCK = (1.0, *(f for span in (1e3, 60.0, 3600.0, 86400.0, 24.0) for f in (span, 1 / span)))
NEAR = 0.1  # relative tolerance of a result that is called approximate

BYTES = {"bytes": 0, "KB": 1, "MB": 2, "GB": 3, "TB": 4, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
SIZE = rf"({DIGITS})\s?({'|'.join(BYTES)})"
AGAIN = re.compile(rf"(?<![\w.]){SIZE}\s?\((?:~|≈|=)?\s?{SIZE}\)")  # 38_280_333_312 bytes (38GB)
WEIGHTS = re.compile(rf"(?<![\w.])({DIGITS})([MB])\s?/\s?({DIGITS})\s?([MGT]i?B)(?![\w/])")  # parameters/memory
BYTES_PER_PARAMETER = (1.0, 40.0)  # from 8-bit weights to mixed precision with copies of gradients and weights
PRECISE = 4  # digits of sizes that were computed and not rounded by hand


def stated(line: int, text: str, *, fenced: bool) -> Iterator[LintFinding]:
    """The contradictions in a line of prose; of a fenced block, which may be code, only sizes in two units."""
    text = LINK.sub(" ", text[:LONGEST])
    found = [("unit", words, likely) for words, likely in (*_twice(text), *_per_parameter(text))]
    found += [] if fenced else [("product", words, likely) for words, likely in _arithmetic(text)]
    for rule, words, likely in found:
        yield LintFinding(line=line, row=0, rule=rule, message=words, likely=likely)


def _arithmetic(text: str) -> Iterator[tuple[str, str]]:
    """Expressions of numbers whose stated value is wrong, and their true value."""
    for match in STATED.finditer(text):
        sign, approximate, result, unit = match[2], match[3], match[4], match[5] or ""
        rough = bool(approximate) or sign not in ("=", "==")
        if not BEFORE.search(text[max(0, match.start() - 12) : match.start()]):
            yield from _compared(match[1], result, unit, rough=rough)
    for match in TURNED.finditer(text):
        if not BEFORE.search(text[max(0, match.start() - 12) : match.start()]):
            yield from _compared(match[3], match[1], "", rough=False)


def _compared(expression: str, result: str, unit: str, *, rough: bool) -> Iterator[tuple[str, str]]:
    """The contradiction between an expression and its result, within the digits that are given."""
    found = TOKEN.findall(expression)
    parts = [(number, sign) for number, _, sign in found]
    units = {unit for number, unit, _ in found if number}
    value, stated = _value(parts), _number(result)
    if value is None or not math.isfinite(stated) or "%" in units:
        return
    if len(units) > 1 and any(sign in ("+", "-", "−") for _, sign in parts):  # 1GB + 512MB
        return
    whole = all("." not in number and sign not in ("/", "÷") for number, sign in parts) and units == {""}
    last = 0.0 if whole and not unit and "." not in result else _last_digit(result)
    slack = NEAR * stated if rough else 0.0
    moved = sum(abs((_value(other) or value) - value) for other in _rounded(parts))
    clock = unit.removesuffix("s") in ("day", "hour", "minute", "m", "") and unit != ""
    factors = {"": (1.0,), "%": (1.0, 100.0)}.get(unit, CLOCK if clock else THOUSANDS)
    factors = factors if units == {""} else (*factors, *(PREFIXES if "K" in units else THOUSANDS), *CLOCK)
    if all(abs(value * f - stated) > (last + slack + moved * f) * (1 + 1e-9) for f in factors):
        words = expression.strip("`( ") if expression.count("(") != expression.count(")") else expression
        right = min((value * f for f in factors), key=lambda v: abs(math.log(v / stated)) if stated else 0.0)
        yield f"{words} is not {result}{unit}", f"{plain(right) if right < 1e15 else f'{right:.4g}'}{unit}"


def _value(parts: list[tuple[str, str]]) -> float | None:
    """The value of an expression; None where it is none, as with brackets that do not match."""
    words = [repr(_number(number)) if number else SAME.get(sign, sign) for number, sign in parts]
    try:
        value = _computed(ast.parse("".join(words), mode="eval").body)
        return value if math.isfinite(value) and value > 0 else None
    except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError):
        return None


def _computed(expression: ast.expr) -> float:
    match expression:
        case ast.Constant(value=float(number)):
            return number
        case ast.BinOp(left=left, op=sign, right=right):
            return float(SIGNS[type(sign)](_computed(left), _computed(right)))
    raise ValueError("no arithmetic")


def _rounded(parts: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """The expression with each of its decimal numbers larger by half of its last digit."""
    for at, (number, _) in enumerate(parts):
        if "." in number:
            larger = _number(number) + _last_digit(number) / 2
            yield [*parts[:at], (repr(larger), ""), *parts[at + 1 :]]


def _number(digits: str) -> float:
    return float(digits.replace(",", "").replace("_", ""))


def _last_digit(digits: str) -> float:
    """The worth of the last digit: results are rounded or cut there."""
    mantissa, _, exponent = digits.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _twice(text: str) -> Iterator[tuple[str, str]]:
    """One size in two units that do not agree, by thousands or by 1024; others are two sizes."""
    for match in AGAIN.finditer(text):
        first, unit, again, other = match.groups()
        power = BYTES[unit] - BYTES[other]
        values = [_number(first) * base**power for base in (1e3, 1024.0)] + [_number(first) * 1.024**3 * 1e3**power]
        half = _last_digit(again) + _last_digit(first) * 1e3**power
        ratio = _number(again) / values[0] if values[0] > 0 else 0.0
        near = 0.5 < ratio < 2 or any(0.9 < ratio * f < 1.1 for f in (1e3, 1e-3))
        if power and near and not min(values) - half <= _number(again) <= max(values) + half:
            yield f"{match[0]}: one size in two units, which differ", f"{plain(values[0])}{other}"


def _per_parameter(text: str) -> Iterator[tuple[str, str]]:
    """Parameters and their memory where only a thousandth, or a thousand times it, is possible."""
    for match in WEIGHTS.finditer(text):
        count, letter, memory, unit = match.groups()
        if min(len(re.sub(r"\D", "", digits)) for digits in (count, memory)) < PRECISE or not _number(count):
            continue
        each = _number(memory) * 1e3 ** BYTES[unit] / (_number(count) * 1e3 ** {"M": 2, "B": 3}[letter])
        low, high = BYTES_PER_PARAMETER
        for factor, power in ((1e-3, -1), (1e3, 1)):
            right = next((name for name, p in BYTES.items() if p == BYTES[unit] + power and len(name) == len(unit)), "")
            if not low <= each <= high and low <= each * factor <= high and right:
                yield f"{match[0]}: {plain(each)} bytes for each parameter", f"{memory}{right}"
