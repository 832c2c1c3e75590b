"""Regular expressions that users give: refused where they could take very long, and the text that each match has."""

import re
from collections.abc import Iterator
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as code  # type: ignore[attr-defined]
from typing import Any

WORD = 4  # characters in a row that each pattern must have: lines without them are passed over


REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT)
FEW = 9  # times that a repetition may repeat a choice or a bounded repetition


def compile_safe(text: str) -> re.Pattern[bytes]:
    """The pattern, for bytes; ValueError for none, one without a word or whose time may grow faster than a square."""
    try:
        compiled, parsed = re.compile(text.encode()), _parser.parse(text.encode())
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is no regular expression ({error})") from None
    if _nested(parsed) or _neighbours(parsed) or sum(1 for _ in _loops(parsed)) > 1:
        raise ValueError("could take very long: at most one .*, no (a+)+, (a|b)+, a*a* or (?=a*) may be in it")
    if not word(compiled):
        raise ValueError(f"must have {WORD} characters in a row that every line has")
    return compiled


def _parts(parsed: Any) -> Iterator[Any]:
    """The patterns inside an operation of a parsed pattern."""
    for value in parsed if isinstance(parsed, tuple | list) else ():
        if isinstance(value, _parser.SubPattern):
            yield value
        else:
            yield from _parts(value)


def _unbounded(operation: Any, value: Any) -> bool:
    return operation in REPEATS and value[1] is code.MAXREPEAT


def _nested(parsed: Any, inside: int = 1, looks: bool = False) -> bool:
    """Whether a repetition, at most `inside` times, repeats a choice or another one, or one stands in a look-around."""
    for operation, value in parsed:
        most, look = 1, looks or operation in (code.ASSERT, code.ASSERT_NOT)
        if operation in REPEATS:
            most = value[1]
            varies = value[0] != most
            if (varies and inside > FEW) or (_unbounded(operation, value) and (inside > 1 or looks)):
                return True
        if operation is code.BRANCH and inside > FEW and not looks:
            return True
        if any(_nested(part, 1 if look and not looks else max(inside, most), look) for part in _parts(value)):
            return True
    return False


def _neighbours(parsed: Any) -> bool:
    """Whether two unbounded repetitions that follow each other may take the same character."""
    before = frozenset[int]()
    for kind, value in _flat(parsed):
        if kind in REPEATS:
            current = _characters(value[2])
            if _unbounded(kind, value) and before & current:
                return True
            before = current if _unbounded(kind, value) else before if value[0] == 0 else frozenset()
        elif kind not in (code.AT, code.ASSERT, code.ASSERT_NOT):
            before = frozenset()
        if any(_neighbours(part) for part in _parts(value)):
            return True
    return False


def _characters(parsed: Any) -> frozenset[int]:
    """The bytes that a pattern of one character matches; of a longer one any."""
    everything = frozenset(range(256))
    if len(parsed) != 1 or parsed[0][0] not in (code.IN, code.LITERAL, code.NOT_LITERAL, code.ANY):
        return everything
    return frozenset(found.start() for found in _compiler.compile(parsed).finditer(bytes(range(256))))


def _loops(parsed: Any) -> Iterator[Any]:
    """The unbounded repetitions of nearly any character: of `.` or of [^x]."""
    for operation, value in parsed:
        for part in _parts(value):
            if _unbounded(operation, value) and len(part) == 1:
                kind, what = part[0]
                negated = kind is code.IN and what[0][0] is code.NEGATE
                if kind is code.ANY or kind is code.NOT_LITERAL or negated:
                    yield part
            yield from _loops(part)


def word(pattern: re.Pattern[bytes]) -> bytes:
    """The longest text that every match of the pattern has; b"" where it is shorter than WORD."""
    found, current = [b""], b""
    for kind, value in _flat(_parser.parse(pattern.pattern)):
        if kind is code.LITERAL and not pattern.flags & re.IGNORECASE:
            current += bytes([value])
        else:
            found, current = [*found, current], b""
    longest = max([*found, current], key=len)
    return longest if len(longest) >= WORD else b""


def _flat(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """The operations that every match passes, groups without flags of their own opened."""
    for kind, value in parsed:
        if kind is code.SUBPATTERN and not value[1]:
            yield from _flat(value[3])
        else:
            yield kind, value
