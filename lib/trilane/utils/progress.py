"""Progress of long work, with an estimate of what remains: on a terminal and in JupyterLab, never
in a batch run.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from trilane.utils.tables import T

# set while notebooks are executed, where a bar would leave a line for each of its states
BATCH = "TRILANE_BATCH"


def progress(items: Sequence[T], what: str, unit: str) -> Iterable[T]:
    """The items, with a bar once they have taken two seconds, which is gone when they are done."""
    if len(items) < 2 or os.environ.get(BATCH):
        return items
    is_kernel = "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel")
    if not is_kernel and not sys.stderr.isatty():
        return items
    kind = importlib.import_module("tqdm.notebook" if is_kernel else "tqdm.std")
    return kind.tqdm(items, desc=what, unit=unit, delay=2, leave=False, dynamic_ncols=True)
