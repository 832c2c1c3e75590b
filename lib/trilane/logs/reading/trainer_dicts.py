"""TrainerDicts: the dicts that Hugging Face's Trainer prints, and the numbers of its iterations,
often not printed.
"""

import math
import re

from trilane.logs.prefixes import NAN
from trilane.logs.reading.runs import PartialRun, Runs
from trilane.logs.table import Row

DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
COLUMNS = {
    "loss": "lm_loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "epoch": "epoch",
    "step": "iteration",
    "total": "train_iters",
}
# tqdm's bar, with the time passed; and that of an evaluation or the data, by its description
BAR = re.compile(rb"(\d{1,15})/(\d{1,15}) \[(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})<")
OTHER_BAR = re.compile(
    rb"(?i)\b(?:eval|val|valid|test|predict|generat|load|map|filter|tokeniz|download|fetch|sav)"
    rb"[\w ]{0,40}:\s{0,9}\d{1,3}%\|"
)


def bar(line: bytes) -> Row:
    """Step, total and elapsed seconds of the progress bar in a line; {} if there is none of the
    training.
    """
    match = BAR.search(line)
    if not match or OTHER_BAR.search(line[: match.start()]):
        return {}
    passed = 3600 * int(match[3] or 0) + 60 * int(match[4]) + int(match[5])
    return {"step": float(match[1]), "total": float(match[2]), "elapsed": float(passed)}


def _dicts(line: bytes) -> list[Row]:
    """The Trainer's dicts in a line, with its names; a progress bar adds `step` and `total`."""
    every: list[Row] = []
    for text in DICT.findall(line):
        values: Row = {}
        for name, number in ENTRY.findall(text):
            try:
                values[name.decode()] = float(number)
            except ValueError:
                continue
        if "loss" in values or "train_runtime" in values:
            every.append(values)
    if every:
        every[0] |= bar(line)
    return every


class TrainerDicts:
    """Gives the dicts to the current run, with the step of the bar on or before their line."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.bar: Row = {}  # the last one on a line of its own

    def read(self, line: bytes) -> None:
        """Read the dicts of a line."""
        for values in _dicts(line):
            run = self._runs.run
            if "loss" not in values:
                run.dialects["hf-trainer"] += 0
                run.summary = run.summary or values
                run.last_line = line
                continue
            before = {name: run.iterations.last(column) for name, column in COLUMNS.items()}
            if "step" not in values and self._is_next(before):
                values = values | self.bar
            if not _is_copy(values, before):
                row = {column: values[name] for name, column in COLUMNS.items() if name in values}
                row.setdefault("iteration", NAN)
                self._runs.step(row, "hf-trainer", values.get("elapsed", NAN), line)

    def _is_next(self, before: Row) -> bool:
        """Whether the bar is of the training, and later than the last dict."""
        if not self.bar or self.bar["total"] != before["total"] == before["total"]:
            return False
        return not self.bar["step"] <= before["step"]


def _is_copy(values: Row, before: Row) -> bool:
    """Whether a dict is another node's or another reporter's copy of the one before, NaN where that
    lacks a value.
    """
    shared = [name for name in COLUMNS if name in values and before[name] == before[name]]
    for name in shared:
        # LLaMA-Factory's own reporter prints the learning rate with five digits:
        # https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/train/callbacks.py
        digits = ".4e" if name == "learning_rate" else ""
        if format(values[name], digits) != format(before[name], digits):
            return False
    return bool(shared)


def number_iterations(run: PartialRun) -> None:
    """Number the iterations whose dicts had no step by `logging_steps` of a run from its start;
    without it, or where only some had one, no iteration has a number, nor a time.
    """
    if "hf-trainer" not in run.dialects or not run.rows:
        return
    numbers = run.iterations.columns["iteration"]
    is_missing = [math.isnan(number) for number in numbers]
    if not any(is_missing):
        return
    steps = NAN
    given = run.arguments.get("logging_steps")
    is_resumed = run.arguments.get("resume_from_checkpoint")
    if isinstance(given, int) and all(is_missing) and not is_resumed:
        steps = float(given)
    for place in range(run.rows):
        numbers[place] = steps * (place + 1)
    if steps != steps:
        run.iterations.columns.pop("sec_per_it", None)
