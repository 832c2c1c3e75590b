"""TrainerDicts: the dicts that Hugging Face's Trainer prints, and the numbers of its iterations,
often not printed.
"""

import contextlib
import math
import re

from trilane.logs.prefixes import NAN
from trilane.logs.reading.runs import BARS, PartialRun, Runs
from trilane.logs.table import NumericTable, Row

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
    rb"(?i)\b(?:eval|val|valid|test|predict|generat|load|map|filter|tokeniz|download|fetch|sav)"
    rb"[\w ]{0,40}:\s{0,9}\d{1,3}%\|"
)
# a bar of iterations by its name: "Epoch:" alone counts epochs
OF_ITERATIONS = re.compile(rb"(?:Epoch \d[\d/]*|Training|Iteration|Steps): {1,4}\d{1,3}%\|")
UP_TO_BAR = re.compile(rb"^.*?\d/\d{1,15} \[\d[^\]]{0,400}\]")


def bar(line: bytes) -> Row:
    """Step, total and elapsed seconds of the progress bar in a line; {} if there is none of the
    training.
    """
    match = BAR.search(line)
    if not match or OTHER_BAR.search(line[: match.start()]):
        return {}
    return {
        "iteration": float(match[1]),
        "train_iters": float(match[2]),
        "elapsed": 3600.0 * int(match[3] or 0) + 60 * int(match[4]) + int(match[5]),
    }


def _rows(line: bytes) -> list[Row]:
    """The Trainer's dicts in a line, by our columns, and its summary by its own names; to the first
    one a progress bar adds its numbers.
    """
    rows = []
    for text in DICT.findall(line):
        values = {}
        for name, number in ENTRY.findall(text):
            with contextlib.suppress(ValueError):
                values[name.decode()] = float(number)
        if "loss" in values:
            rows.append({ours: values[name] for name, ours in COLUMNS.items() if name in values})
        elif "train_runtime" in values:
            rows.append(values)
    if rows:
        rows[0] |= bar(line)
    return rows


class TrainerDicts:
    """Gives the dicts to the current run, with the step of the bar on or before their line."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.bar: Row = {}  # the last one on a line of its own

    def read(self, line: bytes) -> None:
        """Read the dicts of a line."""
        for row in _rows(line):
            run = self._runs.run
            if "lm_loss" not in row:
                run.dialects["hf-trainer"] += 0
                run.summary = run.summary or row
                run.last_line = line
                continue
            if run.dialects[BARS]:
                run.forget()
            if "iteration" not in row and self._is_next(run.iterations):
                row |= self.bar
            elapsed_s = row.pop("elapsed", NAN)
            if not _is_copy(row, run.iterations):
                self._runs.step({"iteration": NAN, **row}, "hf-trainer", elapsed_s, line)

    def see(self, line: bytes) -> None:
        """Read the bar of a line of its own, whose iterations count where nothing else has any."""
        row = bar(line)
        if not row:
            return
        self.bar = row
        if OF_ITERATIONS.search(line):
            counts = {"iteration": row["iteration"], "train_iters": row["train_iters"]}
            self._runs.step(counts, BARS, row["elapsed"], line)

    def _is_next(self, before: NumericTable) -> bool:
        """Whether the bar is of the training, and later than the last dict."""
        total = before.last("train_iters")
        if not self.bar or self.bar["train_iters"] != total == total:
            return False
        return not self.bar["iteration"] <= before.last("iteration")


def _is_copy(row: Row, before: NumericTable) -> bool:
    """Whether a dict is another node's or another reporter's copy of the one before."""
    shared = [name for name in row if not math.isnan(before.last(name))]
    for name in shared:
        # LLaMA-Factory's own reporter prints the learning rate with five digits:
        # https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/train/callbacks.py
        digits = ".4e" if name == "learning_rate" else ""
        if format(row[name], digits) != format(before.last(name), digits):
            return False
    return bool(shared)


def number_iterations(run: PartialRun) -> None:
    """Number the iterations whose dicts had no step by `logging_steps` of a run from its start;
    without it, or where only some had one, no iteration has a number, nor a time.
    """
    if "hf-trainer" not in run.dialects or not run.rows:
        return
    numbers = run.iterations.numbers("iteration")
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
