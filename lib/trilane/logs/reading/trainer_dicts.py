"""TrainerDicts: the dicts that Hugging Face's Trainer prints, and the numbers of its iterations,
often not printed.
"""

import re

import numpy as np

from trilane.logs.prefixes import NAN
from trilane.logs.reading.runs import PartialRun, Runs
from trilane.logs.table import Columns

DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
COLUMNS = {
    "loss": "lm_loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "epoch": "epoch",
}
# tqdm's bar, with the time passed; and that of an evaluation or the data, by its description
BAR = re.compile(rb"(\d{1,15})/(\d{1,15}) \[(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})<")
OTHER_BAR = re.compile(
    rb"(?i)\b(?:eval|val|valid|test|predict|generat|load|map|filter|tokeniz|download|fetch|sav)[\w ]{0,40}:"
    rb"\s{0,9}\d{1,3}%\|"
)
UNNUMBERED = "the log does not number its iterations (no progress bar, no logging_steps)"


def bar(line: bytes) -> dict[str, float]:
    """Step, total and elapsed seconds of the progress bar in a line; {} if there is none of the
    training.
    """
    if not (found := BAR.search(line)) or OTHER_BAR.search(line[: found.start()]):
        return {}
    passed = 3600 * int(found[3] or 0) + 60 * int(found[4]) + int(found[5])
    return {"step": float(found[1]), "total": float(found[2]), "elapsed": float(passed)}


def _dicts(line: bytes) -> list[dict[str, float]]:
    """The Trainer's dicts in a line, with its names; a progress bar, or ms-swift's step, adds
    `step` and `total`.
    """
    found = list[dict[str, float]]()
    for text in DICT.findall(line):
        values = {
            name.decode(): number
            for name, raw in ENTRY.findall(text)
            if (number := _number(raw)) is not None
        }
        if "loss" in values or "train_runtime" in values:
            found.append(values)
    if found:
        found[0] |= bar(line)
        if steps := re.search(rb"'global_step/max_steps': '(\d{1,15})/(\d{1,15})'", line):
            found[0] |= {"step": float(steps[1]), "total": float(steps[2])}
    return found


def _number(raw: bytes) -> float | None:
    try:
        return float(raw)
    except ValueError:
        return None


class TrainerDicts:
    """Gives the dicts to the current run; one waits as `pending` for the bar on a line after it."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.pending = dict[str, float]()
        self.bar: dict[str, float] = {}  # the last one on a line of its own
        self._line = b""  # of the pending dict

    def read(self, line: bytes) -> None:
        """Read the dicts of a line."""
        if b"'eval_" in line:  # the bar after it may be of another step than the dict before it
            self.release()
        for values in _dicts(line):
            if "train_runtime" in values and "loss" not in values:
                self.release()
                run = self._runs.run
                run.dialects["hf-trainer"] += 0
                run.summary, run.last_line = run.summary or values, line
            elif self.pending and _is_copy(
                values, {n: self.pending.get(n, NAN) for n in COLUMNS if n in values}
            ):
                self.pending |= values
            else:
                self.release()
                self.pending, self._line = values, line
                if "step" in values:
                    self.release()

    def release(self, line: bytes = b"") -> None:
        """Read the pending dict, with the step of the bar before it, else of the bar on `line`."""
        if not (values := self.pending):
            return
        self.pending, table = {}, self._runs.run.iterations
        after, total = bar(line), table.last("train_iters")
        total = after.get("total", NAN) if total != total else total
        if "step" not in values:
            bars = [
                b
                for b in (self.bar, after)
                if b and b["total"] == total and b["step"] > self._runs.run.iteration
            ]
            values = values | next(iter(bars), {})
        known = {name: column for name, column in COLUMNS.items() if name in values}
        if table.rows and _is_copy(values, {n: table.last(column) for n, column in known.items()}):
            return
        row = {column: values[name] for name, column in known.items()} | {
            "iteration": values.get("step", NAN)
        }
        row |= {"train_iters": values["total"]} if "total" in values else {}
        row = self._runs.run.timed(row, values.get("elapsed", NAN), "hf-trainer")
        self._runs.step(row, "hf-trainer", self._line)


def _is_copy(values: dict[str, float], before: dict[str, float]) -> bool:
    """Whether a dict is another node's or another reporter's copy of the one before, NaN where that
    lacks a value.
    """
    # LLaMA-Factory's own reporter prints the learning rate with five digits:
    # https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/train/callbacks.py
    rates = {f"{one.get('learning_rate', NAN):.4e}" for one in (values, before)}
    known = [
        name
        for name, old in before.items()
        if old == old and (name != "learning_rate" or len(rates) > 1)
    ]
    return all(values[name] == before[name] for name in known)


def number_iterations(run: PartialRun, columns: Columns) -> None:
    """Number the iterations whose dict had no step by those that have one, which are equally far
    apart; where none has one, by `logging_steps` of a run from its start. Else no iteration has a
    number.
    """
    number = columns.get("iteration", np.empty(0))
    lost = np.isnan(number)
    if "hf-trainer" not in run.dialects or not lost.any():
        return
    at, every, first = np.flatnonzero(~lost), NAN, NAN
    given, names = (
        run.arguments.get("logging_steps"),
        ("resume_from_checkpoint", "logging_first_step"),
    )
    if len(at) > 1:
        every = (number[at[-1]] - number[at[0]]) / (at[-1] - at[0])
        first = number[at[0]] - every * at[0]
    elif (
        type(given) is int
        and given < 1 << 40
        and not any(run.arguments.get(name) for name in names)
    ):
        every = first = float(given)
    steps = first + every * np.arange(len(number))
    if not (
        every >= 1
        and every % 1 == 0
        and first > 0
        and first % every == 0
        and (steps == number)[~lost].all()
    ):
        steps = np.full(len(number), NAN)
        run.notes.append(UNNUMBERED)
        if "sec_per_it" in columns:
            columns["sec_per_it"] = steps
    columns["iteration"] = steps
    run.iteration = float(steps[-1])
