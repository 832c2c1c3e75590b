"""The figures of the notebooks, one module a subject, loaded when it is first used:
`plots.forecast.gantt(...)`.
"""

import pkgutil
from importlib import import_module
from types import ModuleType

from trilane.utils.validation import with_nearest


def __getattr__(name: str) -> ModuleType:
    """The module of that subject."""
    subjects = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in subjects:
        raise AttributeError(
            with_nearest(f"module {__name__!r} has no attribute {name!r}", name, subjects)
        )
    return import_module(f"{__name__}.{name}")
