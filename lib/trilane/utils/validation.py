"""Checks of input: a ValueError of one line, `field=value: the rule`, with the nearest name for an
unknown one.
"""

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

from trilane.utils.masking import masked
from trilane.utils.tables import Json, T, as_json, middle, one_line

DATA = Path(__file__).parents[1] / "data"  # the files that ship with trilane
MOST_JSON_BYTES = 1 << 26  # a search with all its plans has a few million
LARGEST_INTEGER = 1 << 63  # numpy and torch have 64 bits
PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def require(ok: object, field: str, value: object, rule: str) -> None:
    """Raise ValueError("field=value: rule") unless `ok`."""
    if not ok:
        raise ValueError(f"{field}={shown(value)}: {rule}")


def shown(value: object, most: int = 300) -> str:
    """A value as one line for a message, the middle of a long one left out."""
    return one_line(middle(masked(str(value)), most))


def require_line(field: str, value: str) -> None:
    """Raise ValueError unless `value` is one line of printable characters."""
    # a path has at most 4096 bytes (PATH_MAX)
    rule = "must be one line of at most 4000 bytes, without control characters"
    require(value.isprintable() and len(value.encode()) <= 4000, field, value, rule)


def require_path(field: str, value: str) -> None:
    """Raise ValueError unless `value` can be the path of a file, and is not taken for an option of
    a command.
    """
    require_line(field, value)
    require(not value.startswith("-"), field, value, "must not begin with a dash")
    # a name has at most 255 bytes (NAME_MAX); a suffix may be added
    longest = max(len(name.encode()) for name in value.split("/"))
    require(longest <= 240, field, value, "must have at most 240 bytes in each name")


def require_label(field: str, value: str) -> None:
    """Raise ValueError unless `value` can be the name of a folder."""
    require_path(field, value)
    ok = value and value == value.strip() and "/" not in value and not value.startswith(".")
    rule = "must be a plain folder name (no slash, no dot in front, no blank at an end)"
    require(ok and len(value.encode()) <= 200, field, repr(value), f"{rule} of at most 200 bytes")


def require_known(field: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError with the nearest and all known names, unless `value` is one of them."""
    names = sorted(known)
    if value not in names:
        rule = with_nearest(f"known: {', '.join(names)}", str(value)[:300], names)
        require(False, field, value, rule)


def with_nearest(rule: str, name: str, known: Iterable[str]) -> str:
    """The rule, with the known name that is nearest by spelling, where one is."""
    nearest = difflib.get_close_matches(name, known, n=1)
    if not nearest:
        return rule
    return f"{rule}; did you mean {nearest[0]}?"


def require_integer(field: str, value: Any, minimum: int, maximum: int = LARGEST_INTEGER) -> None:
    """Raise ValueError unless `value` is an int (not a bool) of at least `minimum` and at most
    `maximum`.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    rule = f"must be a whole number of at least {minimum}"
    require(is_integer and value >= minimum, field, value, rule)
    require(value <= maximum, field, value, f"must be at most {maximum}")


def require_positive(field: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number above zero."""
    require(is_number(value) and value > 0, field, value, "must be a number above zero")


def is_number(value: object) -> bool:
    """Whether the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -math.inf < value < math.inf


def from_mapping(kind: type[T], values: Any, where: str) -> T:
    """The dataclass `kind` from a JSON object, with nested dataclasses and tuples:
    from_mapping(Plan, values, "plan").

    `where` names the object in errors. ValueError for an unknown, missing or ill-typed field.
    """
    require(isinstance(values, Mapping), where, type(values).__name__, "must be a JSON object")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    for name in values:
        require_known(f"{where} field", name, names)
    for field in fields:
        defaults = (field.default, field.default_factory)
        ok = field.name in values or defaults != (dataclasses.MISSING, dataclasses.MISSING)
        require(ok, f"{where}.{field.name}", "missing", "is required")
    hints = _hints(kind)  # type: ignore[arg-type]
    arguments = {
        name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()
    }
    return kind(**arguments)


_hints = functools.cache(typing.get_type_hints)  # which evaluates each name anew


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):  # always with None
        if value is None:
            return None
        hint = typing.get_args(hint)[0]
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    origin = typing.get_origin(hint)
    if origin is tuple:
        require(isinstance(value, list | tuple), where, value, "must be a list")
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in value)
    if origin is dict:
        require(isinstance(value, Mapping), where, value, "must be a JSON object")
        kind = typing.get_args(hint)[1]
        return {name: _value(kind, item, f"{where}.{name}") for name, item in value.items()}
    if hint not in PLAIN:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < LARGEST_INTEGER, where, value, "must have less than 64 bits")
        if hint is float:
            return float(value)
    is_right = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    require(is_right, where, repr(value), f"must be {PLAIN[hint]}")
    return value


def to_mapping(value: Any) -> Json:
    """A dataclass as a JSON object; from_mapping reads it back."""
    return as_json(dataclasses.asdict(value))


def read_json(path: Path | str, what: str) -> Any:
    """The JSON in `path`; ValueError with its name where it is missing, not JSON, not finite in a
    number, or has a key twice.
    """
    text = read_text(path, what, MOST_JSON_BYTES)
    try:
        return json.loads(
            text, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_unique
        )
    except RecursionError:
        reason = "nested too deep"
    except ValueError as error:  # also an integer of more than 4300 digits
        reason = str(error).partition("; use sys.")[0]
    raise ValueError(f"{what}={shown(path)}: not JSON ({shown(reason)})")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text, 40)} is not a finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return values


def read_object(path: Path | str, what: str, **fields: type) -> Json:
    """The JSON object in `path` with these fields, each of its type; ValueError with its name
    otherwise.
    """
    values = read_json(path, what)
    require(isinstance(values, dict), what, path, "must hold a JSON object")
    for name, kind in fields.items():
        is_right = isinstance(values.get(name), kind)
        require(is_right, what, path, f"must hold `{name}`, a JSON {kind.__name__}")
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
    require(path.is_file(), field, path, "no such file")


def require_folder(field: str, path: Path) -> None:
    """Raise ValueError unless `path` is a folder."""
    require(path.is_dir(), field, path, "no such folder")


def require_new(field: str, path: Path, remedy: str = "name another file") -> None:
    """Raise ValueError where there is anything at `path`, also a link that leads nowhere: nothing
    that trilane did not make is written over.
    """
    require(not os.path.lexists(path), field, path, f"exists; {remedy}")


def parse_count(field: str, text: str) -> float:
    """The number of "40B", "350M", "1.5T" or "1.3e9"; ValueError where it is no finite number above
    zero.
    """
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([KMBTkmbt]?)", text.strip())
    value = 0.0
    if match:
        value = float(match[1]) * 1000.0 ** " KMBT".index(match[2].upper() or " ")
    rule = "must be a number above zero, such as 40B, 350M, 1.5T or 1.3e9"
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
    where = ""
    if isinstance(error, HostError):
        where = f"rank {rank} on {platform.node()}: "
    if where or rank == "0":
        print(f"{prefix}{where}{error}", file=sys.stderr, flush=True)
