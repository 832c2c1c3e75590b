"""What passes between functions: a value that nobody changes, its fields given by name."""

from dataclasses import dataclass, field
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(kind: type[Any]) -> Any:
    """The class as `dataclass(frozen=True, kw_only=True)` makes it."""
    return dataclass(frozen=True, kw_only=True)(kind)
