"""Dialects as tables: how a trainer prints an iteration, one JSON file each in data/dialects/, or one of your own.

Own tables are the files, and those of the folders, that the environment's TRILANE_DIALECTS names, separated by colons.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.logs.dialects import patterns
from trilane.logs.dialects.dialect import COLUMNS, Dialect, column_of
from trilane.utils.validation import DATA, read_json, require, require_file, shown

VARIABLE = "TRILANE_DIALECTS"
KEYS = {
    "name",
    "source",
    "iteration",
    "fields",
    "validation",
    "launch",
    "end",
    "lines",
    "first_iteration",
    "needs",
    "fallback",
}
LARGEST = 1 << 20  # bytes of a table


def read_dialect(path: Path) -> Dialect:
    """The dialect of a JSON file; raises ValueError("dialects=FILE: field=value: the rule")."""
    require_file("dialects", path)
    require(path.stat().st_size < LARGEST, "dialects", path, f"must have less than {LARGEST} bytes")
    table = read_json(path, "dialects")
    try:
        return dialect_of(table)
    except ValueError as error:
        raise ValueError(f"dialects={path}: {error}") from None


def dialect_of(table: Any) -> Dialect:
    """The dialect of a JSON object; raises ValueError("field=value: the rule")."""
    require(isinstance(table, dict), "dialect", table, "must be a JSON object")
    for key in table:
        require(key in KEYS, "key", key, f"is none of {', '.join(sorted(KEYS))}")
    name = table.get("name", "")
    require(isinstance(name, str) and bool(re.fullmatch(r"[\w.-]{1,40}", name)), "name", name, "must be a word")
    source, lines, first = table.get("source", ""), table.get("lines", ""), table.get("first_iteration", 1)
    require(isinstance(source, str), "source", source, "must be text")
    require(lines in ("", "json", "block", "bar"), "lines", lines, "must be json, block or bar, or left out")
    require(isinstance(first, int) and first in (0, 1), "first_iteration", first, "must be 0 or 1")
    needs, fallback = table.get("needs", []), table.get("fallback", False)
    require(
        isinstance(needs, list) and all(map(COLUMNS.__contains__, needs)), "needs", needs, "must be a list of columns"
    )
    require(isinstance(fallback, bool), "fallback", fallback, "must be true or false")
    fields = table.get("fields", {})
    is_table = isinstance(fields, dict) and all(isinstance(value, str) and key.strip() for key, value in fields.items())
    require(is_table, "fields", fields, "must be an object of printed names and columns")
    compiled = {key: _patterns(table, key) for key in ("iteration", "validation", "launch", "end")}
    require(bool(compiled["iteration"]), "iteration", "", "must have a pattern")
    return Dialect(
        name=name,
        source=source,
        fields={key.encode(): column_of(value) for key, value in fields.items()},
        lines=lines,
        first_iteration=first,
        needs=frozenset(needs),
        fallback=fallback,
        words=_words(fields, needs) or tuple({w for found in compiled.values() for w in map(patterns.word, found)}),
        **compiled,
    )


def _words(fields: Mapping[str, str], needs: Sequence[str]) -> tuple[bytes, ...]:
    """The names of a column that an iteration needs, without those that hold another one: () where one is too short."""
    names = [name for name, column in fields.items() if needs and column.split()[0] == needs[0]]
    least = tuple(name.encode() for name in names if not any(other in name for other in names if other != name))
    return least if all(len(name) >= patterns.WORD for name in least) else ()


def _patterns(table: Mapping[str, Any], key: str) -> tuple[re.Pattern[bytes], ...]:
    """The compiled patterns of a key; ValueError for one without a word or a group, or that may take very long."""
    given = table.get(key, [])
    require(
        isinstance(given, list) and all(isinstance(p, str) for p in given), key, given, "must be a list of patterns"
    )
    for pattern in given:
        try:
            compiled = patterns.compile_safe(pattern)
        except ValueError as error:
            raise ValueError(f"{key}={shown(pattern)}: {error}") from None
        groups = {column_of(name.replace("__", " "))[0] for name in compiled.groupindex}
        needs = {"iteration": "iteration", "validation": "lm_loss"}.get(key)
        require(not needs or needs in groups, key, pattern, f"must have a group (?P<{needs}>...)")
    return tuple(re.compile(pattern.encode()) for pattern in given)


@functools.cache
def _read_all(named: str) -> tuple[Dialect, ...]:
    """The dialects that ship with trilane, and before them those of the files and folders in `named`."""
    paths = list[Path]()
    for place in map(Path, filter(None, named.split(os.pathsep))):
        paths += sorted(place.glob("*.json")) if place.is_dir() else [place]
    own = [read_dialect(path) for path in paths]
    names = {dialect.name for dialect in own}
    shipped = map(read_dialect, sorted((DATA / "dialects").glob("*.json")))
    return (*own, *(dialect for dialect in shipped if dialect.name not in names))


def dialects() -> tuple[Dialect, ...]:
    """All dialects that have a table; one of your own replaces that of the same name."""
    return _read_all(os.environ.get(VARIABLE, ""))


def use(paths: Sequence[Path]) -> None:
    """Add tables, files or folders, for this process and those that it starts; ValueError for a bad one."""
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            read_dialect(file)
        rule = f"must not contain {os.pathsep!r}"
        require(os.pathsep not in str(path), "dialects", path, rule)
    os.environ[VARIABLE] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(VARIABLE)])])
