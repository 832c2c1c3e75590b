"""Lines of Hugging Face's Trainer, of torchtitan, and of trilane's steps.jsonl."""

import json
import re
from datetime import datetime
from typing import Any

from trilane.logs.table import NAN

NUMBER = rb"[-+]?(?:[\d.,]+(?:[eE][-+]?\d+)?|nan|inf)"
DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
BAR = re.compile(rb"(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d+)<")  # tqdm's bar on the same line, with the time passed
COUNT = re.compile(rb">>\s+(Total optimization steps|Total train batch size[^=]*|Num examples) = ([\d,]+)")
COUNTS = {b"Total optimization steps": "total_optimization_steps", b"Num examples": "num_examples"}
TITAN = re.compile(
    rb"step:\s*(\d+)\s+loss:\s*(%(n)s)\s+(?:grad_norm:\s*(%(n)s)\s+)?memory:\s*(\d+\.?\d*)GiB\((\d+\.?\d*)%%\)\s+"
    rb"(?:tps|wps):\s*([\d,]+)\s+(?:tflops:\s*(\d[\d,]*\.?\d*)\s+)?mfu:\s*(?:(\d+\.?\d*)%%|N/A)" % {b"n": NUMBER}
)
STAMP = re.compile(rb"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
HF = {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "epoch": "epoch"}
TRILANE = {"tflops": ("flops_per_s_per_gpu", 1e12)}  # other columns have the names of steps.jsonl


def timestamp(line: bytes) -> float:
    """Seconds since 1970 of the first time stamp in the line; NaN if there is none."""
    found = STAMP.search(line)
    if not found:
        return NAN
    try:
        whole = datetime.fromisoformat(f"{found[1].decode()}T{found[2].decode()}+00:00")
    except ValueError:
        return NAN
    return whole.timestamp() + (float(b"0." + found[3]) if found[3] else 0.0)


def hf_dicts(line: bytes) -> list[dict[str, float]]:
    """The Trainer's dicts in a line, with its names; a progress bar on the line adds `step` and `total`."""
    found = []
    for text in DICT.findall(line):
        values = {name.decode(): number for name, raw in ENTRY.findall(text) if (number := _float(raw)) is not None}
        if "loss" in values or "train_runtime" in values:
            found.append(values)
    if found:
        found[0] |= bar(line)
    return found


def bar(line: bytes) -> dict[str, float]:
    """Step, total and elapsed seconds of the progress bar in a line; {} if there is none."""
    if not (found := BAR.search(line)):
        return {}
    passed = 3600 * int(found[3] or 0) + 60 * int(found[4]) + int(found[5])
    return {"step": float(found[1]), "total": float(found[2]), "elapsed": float(passed)}


def bar_parts(line: bytes) -> list[bytes]:
    """The parts of a line that a progress bar overwrote; a dict is joined with the bar before it."""
    parts: list[bytes] = []
    bar = b""
    for part in line.split(b"\r"):
        if b"{'" in part and bar and not BAR.search(part):
            part = bar + part
        elif BAR.search(part):
            bar = part
        parts.append(part)
    return parts


def hf_iteration(values: dict[str, float], before: float, every: float) -> dict[str, float]:
    """The row of a loss dict. Its iteration is the bar's step, or `before` + `every` (logging_steps) without a bar."""
    row = {HF[name]: value for name, value in values.items() if name in HF}
    row["iteration"] = values.get("step", before + every)
    return row | ({"train_iters": values["total"]} if "total" in values else {})


def hf_count(line: bytes) -> tuple[str, int] | None:
    """Name (as an argument) and value of a count that the Trainer prints before training; None for other lines."""
    found = COUNT.search(line)
    if not found:
        return None
    return COUNTS.get(found[1].strip(), "total_train_batch_size"), int(found[2].replace(b",", b""))


def torchtitan_step(line: bytes) -> dict[str, float] | None:
    """The row of a torchtitan step, in bytes, FLOP/s, tokens/s per GPU; None for other lines.

    The loss is -1 on all stages but the last, and then left out.
    """
    found = TITAN.search(ESCAPE.sub(b"", line))
    if not found:
        return None
    names = ("iteration", "lm_loss", "grad_norm", "max_reserved", "memory_share", "tokens_per_gpu_per_second")
    row = {n: v for n, raw in zip(names, found.groups(), strict=False) if raw and (v := _float(raw)) is not None}
    if found[7]:
        row["flops_per_s_per_gpu"] = float(found[7].replace(b",", b"")) * 1e12
    row |= {"max_reserved": row["max_reserved"] * 2**30, "memory_share": row["memory_share"] / 100}
    if found[8]:
        row["mfu"] = float(found[8]) / 100
    if row.get("lm_loss") == -1:
        del row["lm_loss"]
    return row


def trilane_step(line: bytes) -> dict[str, float] | None:
    """The row of a line of steps.jsonl; None for any other text."""
    try:
        values: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or "iteration" not in values or "sec_per_it" not in values:
        return None
    given = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    columns = ((*TRILANE.get(name, (name, 1.0)), value) for name, value in given.items())
    return {column: value * factor for column, factor, value in columns}


def trilane_timers(line: bytes) -> dict[str, float]:
    """The timers in a line of steps.jsonl, in seconds: the maximum over ranks, and the minimum as `<name> min`."""
    timers: dict[str, tuple[float, float]] = json.loads(line).get("timers", {})
    return {key: value for name, (low, high) in timers.items() for key, value in ((f"{name} min", low), (name, high))}


def _float(raw: bytes) -> float | None:
    try:
        return float(raw.replace(b",", b""))
    except ValueError:
        return None
