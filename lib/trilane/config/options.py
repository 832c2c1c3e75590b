"""Options: each field of a plan is declared once: its rule, its words, its command option and its
Megatron name.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

from trilane.utils.validation import (
    LARGEST_INTEGER,
    is_count,
    is_number,
    require,
    require_integer,
    require_known,
)

BOUNDS = (
    ("minimum", "at least", operator.ge),
    ("above", "above", operator.gt),
    ("maximum", "at most", operator.le),
    ("below", "below", operator.lt),
)


def option(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """A field of a plan: `tp: int = option(1, "GPUs that share a layer", minimum=1, label="tp{}")`.

    minimum, maximum, above, below   of a number
    choices    the words that it may be
    label      how the label of a plan names a value that is not the default
    predicts   False where no prediction depends on it: it is no part of a plan's id
    megatron   the argument of Megatron-LM, without dashes
    search     the values that a search tries where none is given; () all that make sense,
               without it the default alone
    cli        False where no command has an option for it; metavar: what its help calls the value
    name       of this option, where it is not the field's; read: what makes the value of its text
    """
    metadata = {"help": help, **facts}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(values: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field of a dataclass that breaks its rule; None is a value
    that was left out.
    """
    kind = values.__class__
    for name in _rules(kind):
        value = getattr(values, name)
        if value is not None:
            check_field(kind, name, value, prefix)


def check_field(kind: type, name: str, value: Any, prefix: str = "") -> None:
    """Raise ValueError where the value breaks the rule of one field."""
    if name in _rules(kind):
        is_whole, rule = _rules(kind)[name]
        check_value(prefix + name, value, is_whole, rule)


def check_value(name: str, value: Any, is_whole: bool, rule: Mapping[str, Any]) -> None:
    """Raise ValueError where the value breaks the rule of a field, whose type is int where it
    `is_whole`.
    """
    if "choices" in rule:
        require_known(name, value, rule["choices"])
        return
    if is_whole:
        require_integer(name, value, rule.get("minimum", 0), rule.get("maximum", LARGEST_INTEGER))
        return
    require(is_number(value), name, value, "must be a number")
    for bound, words, holds in BOUNDS:
        if bound in rule:
            require(holds(value, rule[bound]), name, value, f"must be {words} {rule[bound]:g}")


def read_field(kind: type, name: str, text: str) -> Any:
    """The value of a field that is a choice, a whole number, or yes or no, in a text; ValueError
    where it is none.
    """
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    require_known("choice", name, types)
    value: Any = text
    if types[name] is bool:
        require(text in ("yes", "no"), name, text, "must be yes or no")
        value = text == "yes"
    elif types[name] is int and is_count(text):
        value = int(text)
    check_field(kind, name, value)
    return value


@functools.cache
def _rules(kind: type) -> dict[str, tuple[bool, Mapping[str, Any]]]:
    """The fields that have a rule, and whether they are whole numbers: a search makes many
    topologies.
    """
    kinds = {"choices", *(bound for bound, *_ in BOUNDS)}
    rules: dict[str, tuple[bool, Mapping[str, Any]]] = {}
    for field in dataclasses.fields(kind):
        if not kinds.isdisjoint(field.metadata):
            rules[field.name] = (field.type in (int, int | None), field.metadata)
    return rules


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


def label_words(values: Any) -> list[str]:
    """The words of a label for the fields that have one and not their default value, in the order
    of the fields.
    """
    words = []
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if "label" in field.metadata and value != field.default:
            words.append(field.metadata["label"].format(value))
    return words
