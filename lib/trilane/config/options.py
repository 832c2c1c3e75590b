"""Options: each field of a plan is declared once: its rule, its words, its command option and its
Megatron name.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from trilane.utils.validation import (
    LARGEST_INTEGER,
    is_number,
    parse_count,
    require,
    require_integer,
    require_known,
    shown,
)

# whether it holds (an array for arrays of mbs and gbs), the field to blame, the rule
Rules = Iterable[tuple[Any, str, str]]
NUMBERS: dict[Any, type] = {int: int, int | None: int, float: float, float | None: float}
YES_OR_NO = ("no", "yes")
BOUNDS = (
    ("above", "above", operator.gt),
    ("minimum", "at least", operator.ge),
    ("maximum", "at most", operator.le),
    ("below", "below", operator.lt),
)


def option(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """A field of a plan: `tp: int = option(1, "GPUs that share a layer", minimum=1, label="tp{}")`.

    minimum, maximum, above, below   of a number; it is at least 0 where no minimum is given
    choices    the words that it may be
    label      how the label of a plan names a value that is not the default
    predicts   False where no prediction depends on it: it is no part of a plan's id
    megatron   the argument of Megatron-LM, without dashes
    cli        False where no command has an option for it; metavar: what its help calls the value
    name       of this option, where it is not the field's; read: what makes the value of its text
    """
    metadata = {"help": help, "minimum": 0, **facts}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(values: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field of a dataclass that breaks its rule, or one of its
    rules() of several fields; None is a value that was left out.
    """
    for name, (kind, rule) in _rules(values.__class__).items():
        value = getattr(values, name)
        if value is not None:
            check_value(prefix + name, value, kind, rule)
    if hasattr(values, "rules") and (reason := first_broken(values.rules(), values)):
        raise ValueError(prefix + reason)


def first_broken(rules: Rules, *subjects: Any) -> str | None:
    """`field=value: the rule` of the first that does not hold, with the value that the first of the
    subjects with such a field has; None where all hold.
    """
    for holds, field, rule in rules:
        if not holds:
            owner = next(s for s in subjects if hasattr(s, field.partition(".")[0]))
            return f"{field}={shown(operator.attrgetter(field)(owner))}: {rule}"
    return None


def check_field(kind: type, name: str, value: Any) -> None:
    """Raise ValueError where the value breaks the rule of one field."""
    check_value(name, value, *_rules(kind)[name])


def check_value(name: str, value: Any, kind: Any, rule: Mapping[str, Any]) -> None:
    """Raise ValueError where the value breaks the rule of a field: one of its choices, or a number
    within its bounds, where `kind` is int or float.
    """
    if "choices" in rule:
        require_known(name, value, rule["choices"])
    elif kind is int:
        require_integer(name, value, rule.get("minimum", 0), rule.get("maximum", LARGEST_INTEGER))
    elif kind is float:
        require(is_number(value), name, value, "must be a number")
        for bound, words, holds in BOUNDS:
            if bound in rule:
                require(holds(value, rule[bound]), name, value, f"must be {words} {rule[bound]:g}")


def read_value(name: str, text: str, kind: Any, rule: Mapping[str, Any]) -> Any:
    """The value of a field or option of that type in a text; ValueError where it breaks the rule.

    read_value("tokens", "40B", float, {"above": 0})    4e10, as people write numbers
    """
    if kind is bool:
        require_known(name, text, YES_OR_NO)
        return text == "yes"
    value: Any = text
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            if kind is float and text[-1:].isalpha():
                value = parse_count(name, text)
    check_value(name, value, kind, rule)
    return value


def read_field(kind: type, name: str, text: str) -> Any:
    """The value of a field in a text; ValueError for an unknown one, and where it breaks the
    rule.
    """
    by_name = {field.name: field for field in dataclasses.fields(kind)}
    require_known("choice", name, by_name)
    declared: Any = by_name[name].type
    return read_value(name, text, NUMBERS.get(declared, declared), by_name[name].metadata)


@functools.cache
def _rules(kind: type) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """What check_value() asks of each field: a search makes many topologies."""
    fields = dataclasses.fields(kind)
    return {field.name: (NUMBERS.get(field.type), field.metadata) for field in fields}


def changed(values: Any) -> dict[str, Any]:
    """The fields of a dataclass on which a prediction depends, and that are not what they are
    without being named.
    """
    named = {}
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if field.metadata.get("predicts", True) and value != field.default:
            named[field.name] = changed(value) if dataclasses.is_dataclass(value) else value
    return named
