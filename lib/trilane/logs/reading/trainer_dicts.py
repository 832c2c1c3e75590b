"""TrainerDicts: the dicts that Hugging Face's Trainer prints, and the numbers of its iterations, often not printed."""

import math
import re
from collections.abc import Mapping

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.dialects.prefixes import NAN
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.runs import Runs

DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
COLUMNS = {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "epoch": "epoch"}
# tqdm's bar, with the time passed; and that of an evaluation or the data, by its description
BAR = re.compile(rb"(\d{1,15})/(\d{1,15}) \[(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})<")
OTHER_BAR = re.compile(
    rb"(?i)\b(?:eval|val|valid|test|predict|generat|load|map|filter|tokeniz|download|fetch|sav)[\w ]{0,40}:"
    rb"\s{0,9}\d{1,3}%\|"
)
UNNUMBERED = "the log does not number its iterations (no progress bar, no logging_steps, no steps of an epoch)"


def bar(line: bytes) -> dict[str, float]:
    """Step, total and elapsed seconds of the progress bar in a line; {} if there is none of the training."""
    if not (found := BAR.search(line)) or OTHER_BAR.search(line[: found.start()]):
        return {}
    passed = 3600 * int(found[3] or 0) + 60 * int(found[4]) + int(found[5])
    return {"step": float(found[1]), "total": float(found[2]), "elapsed": float(passed)}


def _dicts(line: bytes) -> list[dict[str, float]]:
    """The Trainer's dicts in a line, with its names; a progress bar, or ms-swift's step, adds `step` and `total`."""
    found = list[dict[str, float]]()
    for text in DICT.findall(line):
        values = dict[str, float]()
        for name, raw in ENTRY.findall(text):
            try:
                values[name.decode()] = float(raw)
            except ValueError:
                continue
        if "loss" in values or "train_runtime" in values:
            found.append(values)
    if found:
        found[0] |= bar(line)
        if steps := re.search(rb"'global_step/max_steps': '(\d{1,15})/(\d{1,15})'", line):
            found[0] |= {"step": float(steps[1]), "total": float(steps[2])}
    return found


class TrainerDicts:
    """Gives the dicts to the current run; one waits as `pending` for the bar on a line after it."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.pending = dict[str, float]()
        self.bar: dict[str, float] = {}  # the last one on a line of its own
        self._line, self._number = b"", 0  # of the pending dict

    def read(self, line: bytes) -> None:
        """Read the dicts of a line. A bar after an evaluation of another epoch is not that of the dict before it."""
        held_out = re.search(rb"\{'eval_\w{1,80}': .{0,4000}'epoch': (\d{1,9}(?:\.\d{1,20})?)\}", line)
        if self.pending and held_out and float(held_out[1]) != self.pending.get("epoch"):
            self.release()
        for values in _dicts(line):
            if "train_runtime" in values and "loss" not in values:
                self.release()
                run = self._runs.run
                run.dialects["hf-trainer"] += 0
                run.steady = ""
                run.summary, run.last_line = run.summary or values, line
            elif self.pending and _is_copy(values, {n: self.pending.get(n, NAN) for n in COLUMNS if n in values}):
                self.pending |= values
            else:
                self.release()
                self.pending, self._line, self._number = values, line, self._runs.number
                if "step" in values:
                    self.release()

    def release(self, line: bytes = b"") -> None:
        """Read the pending dict, with the step of the bar before it, else of the bar on `line`."""
        if not (values := self.pending):
            return
        self.pending, run = {}, self._runs.run
        after, total = bar(line), run.iterations.last("train_iters")
        total = after.get("total", NAN) if total != total else total
        if "step" not in values:
            bars = [b for b in (self.bar, after) if b and b["total"] == total and b["step"] > run.iteration]
            values = values | next(iter(bars), {})
        known = {name: column for name, column in COLUMNS.items() if name in values}
        if run.iterations.rows and _is_copy(values, {n: run.iterations.last(column) for n, column in known.items()}):
            return
        row = {column: values[name] for name, column in known.items()} | {"iteration": values.get("step", NAN)}
        row |= {"train_iters": values["total"]} if "total" in values else {}
        row = run.timed(row, values.get("elapsed", NAN), "hf-trainer")
        self._runs.step(row, "hf-trainer", NAN, self._line, self._number)


def _is_copy(values: dict[str, float], before: dict[str, float]) -> bool:
    """Whether a dict is another node's or another reporter's copy of the one before, NaN where that lacks a value."""
    # LLaMA-Factory's own reporter prints the learning rate with five digits:
    # https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/train/callbacks.py
    rounded = {"learning_rate": 1e-4}
    return all(math.isclose(values[n], old, rel_tol=rounded.get(n, 0.0)) for n, old in before.items() if old == old)


def number_iterations(run: PartialRun) -> None:
    """Number the iterations whose dict had no step by the steps that are known, by `logging_steps`, or by their epochs
    where these show their steps; else none is numbered."""
    table = run.iterations
    if "hf-trainer" not in run.dialects or not table.rows:
        return
    number = table.column("iteration").copy()
    if not (lost := np.isnan(number)).any():
        return
    found = _by_steps(number) if not lost.all() else _by_argument(run)
    found = _by_epochs(run) if found is None and lost.all() else found
    if found is None or (found[~lost] != number[~lost]).any():
        found = np.full(len(number), NAN)
        run.notes.append(UNNUMBERED)
        if "sec_per_it" in table:
            table.replace("sec_per_it", found)
    table.replace("iteration", found)
    run.iteration = float(found[-1])


def _by_steps(number: np.ndarray) -> np.ndarray | None:
    """Steps that are known, which are multiples of their distance, give the others; one alone, its distance from 0."""
    at = np.flatnonzero(np.isfinite(number))
    every = number[at[-1]] / (at[-1] + 1) if len(at) < 2 else (number[at[-1]] - number[at[0]]) / (at[-1] - at[0])
    first = number[at[0]] - every * at[0]
    is_whole = every >= 1 and every % 1 == 0 and first > 0 and first % every == 0
    return first + every * np.arange(len(number)) if is_whole else None


def _by_argument(run: PartialRun) -> np.ndarray | None:
    every, resumed = run.arguments.get("logging_steps"), run.arguments.get("resume_from_checkpoint")
    if not isinstance(every, int) or not 0 < every < 1 << 40 or resumed not in (None, False, ""):
        return None
    first = [1.0] * (run.arguments.get("logging_first_step") is True and every > 1)
    return np.array([*first, *(every * np.arange(1.0, run.iterations.rows + 1 - len(first)))])


def _by_epochs(run: PartialRun) -> np.ndarray | None:
    """The steps of the epochs that are printed, rounded to 0.01 or finer: one pair of first step and distance alone
    must give them all."""
    each = steps_of_an_epoch(run.arguments)
    epoch = run.iterations.column("epoch") if "epoch" in run.iterations else np.full(run.iterations.rows, NAN)
    lines = len(epoch) - 1
    about = (epoch[-1] - epoch[0]) * each / lines if lines else epoch[0] * each
    if not about >= 0:
        return None
    digits = max(2, *(len(repr(float(value)).partition(".")[2]) for value in epoch[:100]))
    rounded = 0.5 * 10.0**-digits + 1e-9
    near = 2 * rounded * each / max(1, lines) + 1
    found = list[np.ndarray]()
    for every in range(max(1, int(about - near)), int(min(about + near, about + 1000)) + 2):
        first = max(1, round(epoch[0] * each / every)) * every
        steps = first + every * np.arange(lines + 1.0)
        found += [steps] * bool((abs(steps / each - epoch) <= rounded).all())
    return found[0] if len(found) == 1 else None


def steps_of_an_epoch(arguments: Mapping[str, Value]) -> float:
    """By the counts that the Trainer prints before it begins; NaN where it does not."""
    counts = {name: n for name, n in arguments.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}
    total, epochs = counts.get("total_optimization_steps"), counts.get("num_epochs")
    batch, examples = counts.get("total_train_batch_size"), counts.get("num_examples")
    return total / epochs if total and epochs else examples / batch if examples and batch else NAN
