"""Checks of input: a ValueError of one line, `field=value: the rule`, with the nearest name for an unknown one."""

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DATA = Path(__file__).parents[1] / "data"  # the files that ship with trilane


def require(ok: bool, field: str, value: object, rule: str) -> None:
    """Raise ValueError("field=value: rule") unless `ok`."""
    if not ok:
        raise ValueError(f"{field}={value}: {rule}")


def require_known(field: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError with the nearest and all known names, unless `value` is one of them."""
    names = list(known)
    if value not in names:
        close = difflib.get_close_matches(str(value), names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{field}={value}: {hint}known: {', '.join(sorted(names))}")


def require_integer(field: str, value: object, minimum: int) -> None:
    """Raise ValueError unless `value` is an int (not a bool) of at least `minimum`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(is_integer and value >= minimum, field, value, f"must be a whole number of at least {minimum}")  # type: ignore[operator]


def require_positive(field: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number above zero."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and 0 < value < float("inf"), field, value, "must be a number above zero")  # type: ignore[operator]


def require_not_negative(field: str, value: object) -> None:
    """Raise ValueError unless `value` is zero or a finite number above."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and 0 <= value < float("inf"), field, value, "must be zero or a number above")  # type: ignore[operator]


def from_mapping(kind: type[T], values: object, where: str) -> T:
    """The dataclass `kind` from a JSON object, nested dataclasses and tuples included.

    `where` names the object in errors ("topology", "plan"). ValueError for an unknown, missing or ill-typed field.
    """
    require(isinstance(values, Mapping), where, type(values).__name__, "must be a JSON object")
    assert isinstance(values, Mapping)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        require_known(f"{where} field", name, fields)
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        require(name in values or not needed, f"{where}.{name}", "missing", "is required")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    origin = typing.get_origin(hint)
    if origin is tuple:
        require(isinstance(value, list | tuple), where, value, "must be a list")
        return tuple(_value(typing.get_args(hint)[0], v, where) for v in value)  # type: ignore[attr-defined]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < 1 << 1000, where, "a number of more than 300 digits", "is too large")
        return float(value)
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if hint in plain:
        right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
        require(right, where, repr(value), f"must be {plain[hint]}")
    elif isinstance(hint, types.UnionType) and value is not None:
        return _value(next(t for t in typing.get_args(hint) if t is not type(None)), value, where)
    return value


def to_mapping(value: Any) -> dict[str, Any]:
    """A dataclass as a JSON object; from_mapping reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


def read_json(path: Path | str, what: str) -> Any:
    """The JSON in `path`; ValueError with its name where it is missing or not JSON."""
    path = Path(path)
    require_file(what, path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{what}={path}: not JSON ({error})") from None


def shipped_json(name: str) -> Any:
    """The JSON that ships as trilane/data/`name`.json."""
    return read_json(Path(__file__).parents[1] / f"data/{name}.json", name)


def require_file(field: str, path: Path) -> None:
    """Raise ValueError unless `path` is a file."""
    require(not path.is_dir(), field, path, "is a folder; a file is needed")
    require(path.is_file(), field, path, "no such file")


def require_folder(field: str, path: Path) -> None:
    """Raise ValueError unless `path` is a folder."""
    require(not path.is_file(), field, path, "is a file; a folder is needed")
    require(path.is_dir(), field, path, "no such folder")


COUNT = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*([KMBTkmbt]?)")


def parse_count(field: str, text: str) -> float:
    """The number of "40B", "350M", "1.5T" or "1.3e9"; ValueError where it is no finite number above zero."""
    found = COUNT.fullmatch(text.strip())
    rule = "must be a number above zero, such as 40B, 350M, 1.5T or 1.3e9"
    value = float(found[1] + (found[2] or "")) * 1000.0 ** " KMBT".index(found[3].upper() or " ") if found else 0.0
    require(0 < value < float("inf"), field, text, rule)
    return value


def parse_integers(field: str, text: str) -> list[int]:
    """The positive integers in "1,2,4"; ValueError with the name `field` otherwise."""
    parts = [part.strip() for part in text.split(",")]
    ok = all(part.isdecimal() and int(part) > 0 for part in parts)
    require(ok, field, text, "must be whole numbers above zero, separated by commas")
    return [int(part) for part in parts]
