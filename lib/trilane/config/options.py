"""Options: each field of a plan is declared once: its rule, its words, its command option and its
Megatron name.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from trilane.utils.validation import is_count, is_number, require, require_integer, require_known


def option(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """A field of a plan: `tp: int = option(1, "GPUs that share a layer", minimum=1, label="tp{}")`.

    minimum, maximum, above, below   of a number
    choices    the words that it may be
    label      how the label of a plan names a value that is not the default
    predicts   False where no prediction depends on it: it is no part of a plan's id
    megatron   the argument of Megatron-LM, without dashes
    search     the values that a search tries where none is given; () all that make sense, without it the default alone
    cli        False where no command has an option for it; metavar: what its help calls the value
    name       of this option, where it is not the field's; read: what makes the value of its text
    """
    if callable(default):
        return dataclasses.field(default_factory=default, metadata={"help": help, **facts})
    return dataclasses.field(default=default, metadata={"help": help, **facts})


def check(values: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field of a dataclass that breaks its rule; None is a value
    that was left out.
    """
    for name in _rules(values.__class__):
        if (value := getattr(values, name)) is not None:
            check_field(values.__class__, name, value, prefix)


def check_field(kind: type, name: str, value: Any, prefix: str = "") -> None:
    """Raise ValueError where the value breaks the rule of one field."""
    if name in _rules(kind):
        check_value(prefix + name, value, *_rules(kind)[name])


def check_value(name: str, value: Any, is_whole: bool, rule: Mapping[str, Any]) -> None:
    """Raise ValueError where the value breaks the rule of a field, whose type is int where it
    `is_whole`.
    """
    if "choices" in rule:
        require_known(name, value, rule["choices"])
    elif is_whole:
        require_integer(name, value, rule.get("minimum", 0), rule.get("maximum", 1 << 63))
    else:
        words = {
            "minimum": "at least {:g}",
            "above": "above {:g}",
            "maximum": "at most {:g}",
            "below": "below {:g}",
        }
        text = ", ".join(word.format(rule[kind]) for kind, word in words.items() if kind in rule)
        require(is_number(value), name, value, f"must be a number{', ' * bool(text)}{text}")
        low = rule.get("minimum", value) <= value and rule.get("above", -math.inf) < value
        high = value <= rule.get("maximum", value) and value < rule.get("below", math.inf)
        require(low and high, name, value, f"must be {text}")


def read_field(kind: type, name: str, text: str) -> Any:
    """The value of a field that is a choice, a whole number, or yes or no, in a text; ValueError
    where it is none.
    """
    hint = next((f.type for f in dataclasses.fields(kind) if f.name == name), None)
    require_known("choice", name, [f.name for f in dataclasses.fields(kind)])
    require(hint is not bool or text in ("yes", "no"), name, text, "must be yes or no")
    value = text == "yes" if hint is bool else int(text) if hint is int and is_count(text) else text
    check_field(kind, name, value)
    return value


@functools.cache
def _rules(kind: type) -> dict[str, tuple[bool, Mapping[str, Any]]]:
    """The fields that have a rule, and whether they are whole numbers: a search makes many
    topologies.
    """
    fields, named = dataclasses.fields(kind), {"minimum", "maximum", "above", "below", "choices"}
    return {
        f.name: (f.type in (int, int | None), f.metadata) for f in fields if named & {*f.metadata}
    }


def changed(values: Any) -> dict[str, Any]:
    """The fields of a dataclass on which a prediction depends, and that are not what they are
    without being named.
    """
    found = {
        f.name: getattr(values, f.name)
        for f in dataclasses.fields(values)
        if f.metadata.get("predicts", True)
    }
    usual = {f.name: f.default for f in dataclasses.fields(values)}
    return {
        name: changed(value) if dataclasses.is_dataclass(value) else value
        for name, value in found.items()
        if value != usual[name]
    }


def label_words(values: Any) -> list[str]:
    """The words of a label for the fields that have one and not their default value, in the order
    of the fields.
    """
    fields = [
        (f, getattr(values, f.name)) for f in dataclasses.fields(values) if "label" in f.metadata
    ]
    return [f.metadata["label"].format(value) for f, value in fields if value != f.default]
