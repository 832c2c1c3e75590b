"""The progress of a run: a bar in a terminal or a notebook, lines in a batch run."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trilane.utils.tables import Html

BATCH = "TRILANE_BATCH"  # set while notebooks are executed, where a bar would leave a line for each of its states
LINES = 5  # per run, in a batch
Show = Callable[[Mapping[str, Any]], None]  # takes a record of steps.jsonl


@contextlib.contextmanager
def progress(label: str, train_iters: int, wanted: bool = True) -> Iterator[Show]:
    """A function that shows one step; it does nothing where `wanted` is False or stderr is not a terminal."""
    if wanted and os.environ.get(BATCH):
        yield lambda step: _line(label, train_iters, step)
    elif wanted and _in_kernel():
        yield _notebook_bar(label, train_iters)
    elif wanted and sys.stderr.isatty():
        from tqdm.std import tqdm

        with tqdm(total=train_iters, desc=label, unit="it", dynamic_ncols=True) as bar:

            def show(step: Mapping[str, Any]) -> None:
                bar.set_postfix_str(f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it", refresh=False)
                bar.update(step["iteration"] - bar.n)

            yield show
    else:
        yield lambda step: None


def text(label: str, train_iters: int, step: Mapping[str, Any]) -> str:
    """ "tp2-pp1-dp1: 10/50, loss 3.402, 0.431 s/it"."""
    return f"{label}: {step['iteration']}/{train_iters}, loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it"


def _in_kernel() -> bool:
    """Whether this process is a notebook's kernel, not only one that has imported ipykernel."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None


def _line(label: str, train_iters: int, step: Mapping[str, Any]) -> None:
    if step["iteration"] % max(1, train_iters // LINES) == 0:
        print(text(label, train_iters, step), flush=True)


def _notebook_bar(label: str, train_iters: int) -> Show:
    from IPython.display import HTML, display

    def html(done: int, caption: str) -> HTML:
        bar = f'<progress style="width: 16em; vertical-align: middle" max="{train_iters}" value="{done}"></progress>'
        return HTML(Html.of("{} {:code}", Html(bar), caption))

    handle = display(html(0, f"{label}: starting"), display_id=True)
    return lambda step: handle.update(html(step["iteration"], text(label, train_iters, step)))
