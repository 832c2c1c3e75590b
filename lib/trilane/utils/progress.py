"""Progress of long work, with an estimate of what remains: on a terminal and in JupyterLab, never
in a batch run.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from trilane.utils.tables import T

# set while notebooks are executed, where a bar would leave a line for each of its states
BATCH = "TRILANE_BATCH"


def progress(items: Sequence[T], what: str, unit: str) -> Iterable[T]:
    """The items, with a bar once they have taken two seconds, which is gone when they are done."""
    if len(items) > 1 and is_watched():
        return bar(items, desc=what, unit=unit, delay=2, leave=False)
    return items


def is_watched() -> bool:
    """Whether a person sees this process: on a terminal, or as a notebook's kernel, not in a batch
    run.
    """
    return not os.environ.get(BATCH) and (_is_kernel() or sys.stderr.isatty())


def _is_kernel() -> bool:
    if "IPython" not in sys.modules:
        return False
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None


def bar(items: Sequence[Any] | None = None, **options: Any) -> Any:
    """tqdm's bar: a widget in JupyterLab, else text."""
    kind = importlib.import_module("tqdm.notebook" if _is_kernel() else "tqdm.std")
    return kind.tqdm(items, dynamic_ncols=True, **options)
