"""Lines of Hugging Face's Trainer, of torchtitan, and of our own steps.jsonl."""

import json
import re
from typing import Any

NUMBER = rb"([-+]?(?:[\d.,]+(?:[eE][-+]?\d+)?|nan|inf))"
DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
BAR = re.compile(rb"(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d+)<")  # tqdm's bar on the same line, with the time passed
COUNT = re.compile(rb">>\s+(Total optimization steps|Total train batch size[^=]*|Num examples) = ([\d,]+)")
COUNTS = {b"Total optimization steps": "total_optimization_steps", b"Num examples": "num_examples"}

TITAN = re.compile(
    rb"step:\s*(\d+)\s+loss:\s*"
    + NUMBER
    + rb"\s+(?:grad_norm:\s*"
    + NUMBER
    + rb"\s+)?memory:\s*(\d+\.?\d*)GiB\((\d+\.?\d*)%\)"
    rb"\s+(?:tps|wps):\s*([\d,]+)\s+(?:tflops:\s*(\d[\d,]*\.?\d*)\s+)?mfu:\s*(?:(\d+\.?\d*)%|N/A)"
)

ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
HF = {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "epoch": "epoch"}
OURS = {"tflops": ("flops_per_s_per_gpu", 1e12)}


def hf_dicts(line: bytes) -> list[dict[str, float]]:
    """The Trainer's dicts in a line, by their own names; a bar on the line adds `step` and `total`."""
    found = []
    for text in DICT.findall(line):
        values = {name.decode(): number for name, raw in ENTRY.findall(text) if (number := _float(raw)) is not None}
        if "loss" in values or "train_runtime" in values:
            found.append(values)
    if found:
        found[0] |= bar(line)
    return found


def bar(line: bytes) -> dict[str, float]:
    """Step, total and seconds passed of the progress bar in a line; {} where there is none."""
    if not (found := BAR.search(line)):
        return {}
    passed = 3600 * int(found[3] or 0) + 60 * int(found[4]) + int(found[5])
    return {"step": float(found[1]), "total": float(found[2]), "elapsed": float(passed)}


def bar_parts(line: bytes) -> list[bytes]:
    """The parts of a line that a progress bar wrote over; a dict comes with the bar that stood before it."""
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
    """A row of the loss dict. Its step is the bar's; without a bar, `every` (logging_steps) after the one `before`."""
    row = {HF[name]: value for name, value in values.items() if name in HF}
    row["iteration"] = values.get("step", before + every)
    return row | ({"train_iters": values["total"]} if "total" in values else {})


def hf_count(line: bytes) -> tuple[str, int] | None:
    """A number that the Trainer tells before it trains, named as an argument."""
    found = COUNT.search(line)
    if not found:
        return None
    return COUNTS.get(found[1].strip(), "total_train_batch_size"), int(found[2].replace(b",", b""))


def titan(line: bytes) -> dict[str, float] | None:
    """torchtitan's step: bytes, FLOP/s, tokens per second of one GPU. Its loss is -1 off the last stage: left out."""
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


def our_step(line: bytes) -> dict[str, float] | None:
    """A line of our steps.jsonl; None for any other JSON."""
    try:
        values: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or "iteration" not in values or "sec_per_it" not in values:
        return None
    row = {}
    for name, value in values.items():
        column, factor = OURS.get(name, (name, 1.0))
        if isinstance(value, int | float):
            row[column] = float(value) * factor
    return row


def our_timers(line: bytes) -> dict[str, float]:
    """The timers in a line of our steps.jsonl, in seconds: the maximum over ranks, and `<name> min`."""
    told: dict[str, tuple[float, float]] = json.loads(line).get("timers", {})
    return {key: value for name, (low, high) in told.items() for key, value in ((f"{name} min", low), (name, high))}


def _float(raw: bytes) -> float | None:
    try:
        return float(raw.replace(b",", b""))
    except ValueError:
        return None
