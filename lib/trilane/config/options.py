"""Fields of dataclasses that are options of commands too: each is declared once, with its words and limits."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with a default and its help text; `more`: choices, minimum, maximum, metavar, or cli=False for none.

    gbs: int = option(2048, "sequences an iteration", minimum=1)
    """
    return field(default=default, metadata={"help": help, **more})
