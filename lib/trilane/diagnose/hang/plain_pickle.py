"""Reader of pickles of plain values, opcode by opcode (CPython, Lib/pickletools.py), never by Python's own reader.

That reserves any amount of memory that a file asks for, takes a time exponential in the size of some, and calls what
they name.
"""

from struct import Struct
from typing import Any

from trilane.utils.validation import require

GET, LONG_GET, PUT, LONG_PUT, MARK, STOP = b"hjqr(."
MEMOIZE, INDEX = 0x94, Struct("<I")
SKIP = {0x80: 1, 0x95: 8}  # protocol and frame: bytes of their argument
CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
NUMBERS = {ord(code): Struct(form) for code, form in (("K", "<B"), ("M", "<H"), ("J", "<i"), ("G", ">d"))}
TEXTS = {ord("X"): Struct("<I"), 0x8C: Struct("<B"), 0x8D: Struct("<Q")}
LONG = 0x8A
EMPTY = {ord("]"): list, ord("}"): dict, ord(")"): tuple}
TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}


def load_plain(data: bytes) -> Any:
    """The value of a pickle of lists, tuples, dicts, text and numbers; any other raises one of flight_recorder.DAMAGED.

    Nothing in it is called or imported, and memory stays in proportion to its size. A value may hold another many
    times, so that it must not be walked through as a whole.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0
    while True:
        code, at = data[at], at + 1
        if code == GET:
            stack.append(memo[data[at]])
            at += 1
        elif code == MARK:
            marks.append(len(stack))
        elif code == LONG_GET:
            stack.append(memo[INDEX.unpack_from(data, at)[0]])
            at += 4
        elif code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == PUT:
            memo[data[at]] = stack[-1]
            at += 1
        elif code == LONG_PUT:
            memo[INDEX.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif code == STOP:
            return stack.pop()
        elif code in SKIP:
            at += SKIP[code]
        elif not _collected(code, stack, marks):
            value, at = _scalar(code, data, at)
            stack.append(value)


def _collected(code: int, stack: list[Any], marks: list[int]) -> bool:
    """Whether the opcode makes or fills a list, tuple or dict; then that is done."""
    if code in EMPTY:
        stack.append(EMPTY[code]())
        return True
    if code in TUPLES:
        first = len(stack) - TUPLES[code]
    elif code in b"as":
        first = len(stack) - 1 - (code == ord("s"))
    elif code in b"teu":
        first = marks.pop()
    else:
        return False
    items = stack[first:]
    del stack[first:]
    if code in b"ae":
        list.extend(stack[-1], items)  # TypeError for any other object
    elif code in b"su":
        keys = items[::2]
        require(all(type(key) in (str, int) for key in keys), "pickle", "a key", "must be text or a number")
        dict.update(stack[-1], zip(keys, items[1::2], strict=True))
    else:
        stack.append(tuple(items))
    return True


def _scalar(code: int, data: bytes, at: int) -> tuple[Any, int]:
    """The constant, number or text of an opcode, and where it ends."""
    if code in CONSTANTS:
        return CONSTANTS[code], at
    if code in NUMBERS:
        return NUMBERS[code].unpack_from(data, at)[0], at + NUMBERS[code].size
    if code == LONG:
        end = at + 1 + data[at]
        return int.from_bytes(data[at + 1 : end], "little", signed=True), end
    if code in TEXTS:
        first = at + TEXTS[code].size
        end = first + TEXTS[code].unpack_from(data, at)[0]
        require(end <= len(data), "pickle", "a text", "ends after the file")
        return data[first:end].decode("utf-8", "replace"), end
    raise ValueError(f"asks for an object or a call (opcode {bytes([code])!r}), which no Flight Recorder dump needs")
