"""The figures of the notebooks, one module a subject, loaded when it is first used:
`plots.forecast.page(...)`.
"""

from importlib import import_module
from typing import Any

SUBJECTS = ("explorer", "forecast", "losses", "runs")


def __getattr__(name: str) -> Any:
    """The module of that subject."""
    if name not in SUBJECTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
