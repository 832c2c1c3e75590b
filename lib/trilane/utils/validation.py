"""Checks of input: a ValueError of one line, `field=value: the rule`, with the nearest name for an
unknown one.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import platform
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trilane.utils.tables import T, as_json, middle, one_line

DATA = Path(__file__).parents[1] / "data"  # the files that ship with trilane


def require(ok: bool, field: str, value: object, rule: str) -> None:
    """Raise ValueError("field=value: rule") unless `ok`."""
    if not ok:
        raise ValueError(f"{field}={shown(value)}: {rule}")


def shown(value: object, most: int = 300) -> str:
    """A value as one line for a message, the middle of a long one left out."""
    # str() refuses a number of more than 4300 digits
    is_huge = isinstance(value, int) and value.bit_length() > 1000
    if isinstance(value, list | dict) and len(value) > most:
        return f"a {type(value).__name__} of {len(value)}"
    return "a number of more than 300 digits" if is_huge else one_line(middle(str(value), most))


def require_line(field: str, value: str) -> None:
    """Raise ValueError unless `value` is one line of printable characters."""
    # a path has at most 4096 bytes (PATH_MAX)
    rule = "must be one line of at most 4000 characters, without control characters"
    require(value.isprintable() and len(value) <= 4000, field, value, rule)


def require_path(field: str, value: str) -> None:
    """Raise ValueError unless `value` can be the path of a file, and is not taken for an option of
    a command.
    """
    require_line(field, value)
    require(not value.startswith("-"), field, value, "must not begin with a dash")
    # a name has at most 255 bytes (NAME_MAX); a suffix may be added
    fits = len(value.encode()) <= 4000 and all(
        len(name.encode()) <= 240 for name in value.split("/")
    )
    require(fits, field, value, "must have at most 4000 bytes, and 240 in each name")


def require_label(field: str, value: str) -> None:
    """Raise ValueError unless `value` can be the name of a folder."""
    require_path(field, value)
    ok = (
        value == value.strip()
        and 0 < len(value.encode()) <= 200
        and "/" not in value
        and value[0] != "."
    )
    rule = "must be a plain folder name (no slash, no dot in front, no blank at an end, at most 200 bytes)"
    require(ok, field, repr(value), rule)


def require_known(field: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError with the nearest and all known names, unless `value` is one of them."""
    names = list(known)
    if value not in names:
        hint = f"{_hint(value, names)} known: {', '.join(sorted(names))}"
        require(False, field, value, hint.lstrip())


def with_nearest(rule: str, value: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The rule with the name that may be meant: "no such file; did you mean run.log?"."""
    return "; ".join(filter(None, (rule, _hint(value, names, cutoff))))


def _hint(value: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question with the name that begins with the value, or is nearest to it; "" where none is."""
    word, known = str(value)[:300], sorted(names)
    longer = [name for name in known if len(word) > 1 and name.startswith(word)]
    close = longer or difflib.get_close_matches(word, known, 1, cutoff)
    return f"did you mean {close[0]}?" if close else ""


def _missing(rule: str, path: Path) -> str:
    with contextlib.suppress(OSError):
        return with_nearest(rule, path.name, os.listdir(path.parent), 0.8)  # endings are equal
    return rule


def require_integer(field: str, value: Any, minimum: int, maximum: int = 1 << 63) -> None:
    """Raise ValueError unless `value` is an int (not a bool) of at least `minimum` and at most
    `maximum`.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(
        is_integer and value >= minimum,
        field,
        value,
        f"must be a whole number of at least {minimum}",
    )
    require(value <= maximum, field, value, f"must be at most {maximum}")


def require_positive(field: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number above zero."""
    require(is_number(value) and value > 0, field, value, "must be a number above zero")


def require_not_negative(field: str, value: Any) -> None:
    """Raise ValueError unless `value` is zero or a finite number above."""
    require(is_number(value) and value >= 0, field, value, "must be zero or a number above")


def is_number(value: object) -> bool:
    """Whether the value is a finite number."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -math.inf < value < math.inf
    )


def from_mapping(kind: type[T], values: Any, where: str) -> T:
    """The dataclass `kind` from a JSON object, with nested dataclasses and tuples:
    from_mapping(Plan, values, "plan").

    `where` names the object in errors. ValueError for an unknown, missing or ill-typed field.
    """
    require(isinstance(values, Mapping), where, type(values).__name__, "must be a JSON object")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        require_known(f"{where} field", name, fields)
    for name, field in fields.items():
        needed = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        require(name in values or not needed, f"{where}.{name}", "missing", "is required")
    hints = typing.get_type_hints(kind)
    return kind(
        **{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    )


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    if isinstance(hint, types.UnionType) and value is not None:
        return _value(next(t for t in typing.get_args(hint) if t is not type(None)), value, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        require(isinstance(value, list | tuple), where, value, "must be a list")
        return tuple(_value(typing.get_args(hint)[0], v, where) for v in value)
    if origin is dict:
        texts = isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())
        require(texts, where, value, "must be a JSON object of texts")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < 1 << 1000, where, value, "is too large")
        return float(value)
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if hint in plain:
        right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
        require(right, where, repr(value), f"must be {plain[hint]}")
        require(
            hint is not int or abs(value) < 1 << 63, where, value, "must have less than 64 bits"
        )
    return value


def to_mapping(value: Any) -> dict[str, Any]:
    """A dataclass as a JSON object; from_mapping reads it back."""
    return as_json(dataclasses.asdict(value))


def read_json(path: Path | str, what: str) -> Any:
    """The JSON in `path`; ValueError with its name where it is missing, not JSON, or not finite in
    a number.

    A key that an object holds twice is refused.
    """

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{shown(number, 40)} is not a finite number")
        return float(number)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = max(values, key=names.count)
            raise ValueError(f"the key {shown(repr(twice), 40)} is there twice")
        return values

    text = read_text(path, what, 1 << 26)  # a search with all its plans has a few million bytes
    try:
        return json.loads(text, parse_float=finite, parse_constant=finite, object_pairs_hook=unique)
    except RecursionError:
        reason = "nested too deep"
    except ValueError as error:  # also an integer of more than 4300 digits
        reason = str(error).partition("; use sys.")[0]
    raise ValueError(f"{what}={shown(path)}: not JSON ({shown(reason)})")


def read_object(path: Path | str, what: str, **fields: type) -> dict[str, Any]:
    """The JSON object in `path` with these fields, each of its type; ValueError with its name
    otherwise.
    """
    values = read_json(path, what)
    require(isinstance(values, dict), what, path, "must hold a JSON object")
    for name, kind in fields.items():
        words = "an object" if kind is dict else "a list" if kind is list else "text"
        require(isinstance(values.get(name), kind), what, path, f"must hold `{name}`, {words}")
    return values


def read_text(path: Path | str, what: str, most: int, errors: str = "strict") -> str:
    """The text of a regular file of at most `most` bytes in UTF-8; ValueError with its name
    otherwise.

    With `errors` "replace", bytes that are no UTF-8 are replaced.
    """
    path = Path(path)
    require_file(what, path)
    size = path.stat().st_size
    require(size <= most, what, path, f"has {size} bytes; at most {most} are read")
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}={shown(path)}: not text in UTF-8 (byte {error.start})") from None


@functools.cache
def shipped_json(name: str) -> Any:
    """The JSON that ships as trilane/data/`name`.json: one for all callers, so none changes it."""
    return read_json(DATA / f"{name}.json", name)


def require_file(field: str, path: Path) -> None:
    """Raise ValueError unless `path` is a file."""
    require(not path.is_dir(), field, path, "is a folder; a file is needed")
    require(
        path.is_file(),
        field,
        path,
        "is no regular file" if path.exists() else _missing("no such file", path),
    )


def require_folder(field: str, path: Path) -> None:
    """Raise ValueError unless `path` is a folder."""
    require(not path.is_file(), field, path, "is a file; a folder is needed")
    require(path.is_dir(), field, path, _missing("no such folder", path))


def parse_count(field: str, text: str) -> float:
    """The number of "40B", "350M", "1.5T" or "1.3e9"; ValueError where it is no finite number above
    zero.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([KMBTkmbt]?)", text.strip())
    rule = "must be a number above zero, such as 40B, 350M, 1.5T or 1.3e9"
    value = (
        float(found[1] + (found[2] or "")) * 1000.0 ** " KMBT".index(found[3].upper() or " ")
        if found
        else 0.0
    )
    require(0 < value < math.inf, field, text, rule)
    return value


def is_count(text: str) -> bool:
    """Whether the text is a whole number without a sign, of at most 18 digits."""
    return text.isdecimal() and len(text) <= 18


def parse_integers(field: str, text: str) -> list[int]:
    """The positive integers in "1,2,4"; ValueError with the name `field` otherwise."""
    parts = [part.strip() for part in text.split(",")]
    ok = all(is_count(part) and int(part) > 0 for part in parts)
    require(ok, field, text, "must be whole numbers above zero, separated by commas")
    return [int(part) for part in parts]


class HostError(ValueError):
    """This host lacks what other hosts may have: each affected rank prints its own line."""


def print_refusal(error: ValueError, prefix: str = "") -> None:
    """Print one line to stderr: on rank 0 alone for errors common to all ranks, on each rank for a
    HostError.
    """
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if isinstance(error, HostError):
        print(f"{prefix}rank {rank} on {platform.node()}: {error}", file=sys.stderr, flush=True)
    elif rank == "0":
        print(f"{prefix}{error}", file=sys.stderr, flush=True)
