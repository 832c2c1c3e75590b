"""The figures of the notebooks, one module a subject, loaded when it is first used: `plots.forecast.gantt(...)`."""

from importlib import import_module, util
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """The module of that subject."""
    if name.startswith("_") or util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
