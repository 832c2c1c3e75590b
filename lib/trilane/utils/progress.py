"""Progress of long work, with an estimate of what remains: on a terminal and in JupyterLab, never in a batch run."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from trilane.utils.numbers import duration
from trilane.utils.tables import Html

T = TypeVar("T")
BATCH = "TRILANE_BATCH"  # set while notebooks are executed, where a bar would leave a line for each of its states
LATE_S = 2.0  # shorter work shows nothing
EVERY_S = 0.5  # between two states of a bar in JupyterLab


def progress(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """The items, one after the other. Once they have taken LATE_S, a bar shows how many are done and the time left.

    The bar is gone when they are done. Nothing is shown for a single item, in a batch run, and where stderr is no
    terminal.
    """
    if len(items) < 2 or os.environ.get(BATCH):
        yield from items
    elif in_kernel():
        yield from _in_notebook(items, what, unit)
    elif sys.stderr.isatty():
        from tqdm.std import tqdm

        yield from tqdm(items, desc=what, unit=unit, delay=LATE_S, leave=False, dynamic_ncols=True)
    else:
        yield from items


def in_kernel() -> bool:
    """Whether this process is a notebook's kernel, not only one that has imported ipykernel."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None


def bar_html(done: int, total: int, caption: str) -> Html:
    """A bar with a caption for JupyterLab."""
    bar = '<progress style="width: 16em; vertical-align: middle" max="{:d}" value="{:d}"></progress> {:code}'
    return Html.of(bar, total, done, caption)


def _in_notebook(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """As progress() in a kernel: one display, which is emptied at the end."""
    from IPython.display import HTML, display

    handle: Any = None
    begun = shown = time.monotonic()
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if done and now - begun > LATE_S and now - shown > EVERY_S:
                left = duration((now - begun) / done * (len(items) - done))
                html = HTML(bar_html(done, len(items), f"{what}: {done} of {len(items)} {unit}s, about {left} left"))
                handle = handle.update(html) or handle if handle else display(html, display_id=True)
                shown = now
            yield item
    finally:
        if handle:
            handle.update(HTML(""))
