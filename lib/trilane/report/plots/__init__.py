"""The figures of the notebooks, one module a subject, loaded when it is first used:
`plots.forecast.gantt(...)`.
"""

import pkgutil
from importlib import import_module
from typing import Any

from trilane.utils.hooks import hook
from trilane.utils.validation import with_nearest


def __getattr__(name: str) -> Any:
    """The module of that subject, or the figure of a hang."""
    if name == "hang_grid":
        return hook(name)
    subjects = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in subjects:
        raise AttributeError(
            with_nearest(f"module {__name__!r} has no attribute {name!r}", name, subjects)
        )
    return import_module(f"{__name__}.{name}")
