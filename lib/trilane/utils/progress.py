"""Progress of long work, with an estimate of what remains: on a terminal and in JupyterLab, never
in a batch run.
"""

import os
import sys
from collections.abc import Iterable, Sequence

from trilane.utils.tables import T

# set while notebooks are executed, where a bar would leave a line for each of its states
BATCH = "TRILANE_BATCH"


def progress(items: Sequence[T], what: str, unit: str) -> Iterable[T]:
    """The items, with a bar once they have taken two seconds, which is gone when they are done."""
    is_in_kernel = type(sys.stderr).__module__ == "ipykernel.iostream"
    is_seen = sys.stderr.isatty() or is_in_kernel
    if not is_seen or os.environ.get(BATCH):
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=what, unit=unit, delay=2, leave=False, dynamic_ncols=True)
