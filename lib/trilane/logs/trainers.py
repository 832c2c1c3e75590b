"""Lines of Hugging Face's Trainer, trilane's steps.jsonl, and DeepSpeed: steps, memory, flops profiler."""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from trilane.logs.megatron import PREFIXES
from trilane.logs.table import NAN

DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
BAR = re.compile(
    rb"(\d{1,15})/(\d{1,15}) \[(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})<"
)  # tqdm's bar on the same line, with the time passed
COUNT = re.compile(rb">>\s+(Total optimization steps|Total train batch size[^=]{0,100}|Num examples) = (\d[\d,]{0,20})")
COUNTS = {b"Total optimization steps": "total_optimization_steps", b"Num examples": "num_examples"}
STAMP = re.compile(rb"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
HF = {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "epoch": "epoch"}
TRILANE = {"tflops": ("flops_per_s_per_gpu", 1e12)}  # other columns have the names of steps.jsonl
LONGEST_BAR = 1000  # bytes
GIB = 2**30  # what DeepSpeed prints as GB is GiB
VALUE = rb"([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))"
STEP = re.compile(rb"\[Rank \d+\] step=(\d+), skipped=(\d+), lr=\[?" + VALUE + rb"?")
PIPELINE = re.compile(rb"steps: (\d+) loss: %s iter time \(s\): %s samples/sec: %s" % (VALUE, VALUE, VALUE))
THROUGHPUT = re.compile(rb"(?:global_step=(\d+)|\d{1,15}/(\d{1,15})), (?:RunningAvg)?SamplesPerSec=" + VALUE)
CURRENT = re.compile(rb"CurrSamplesPerSec=" + VALUE)
TIMER_MEMORY = re.compile(rb"MemAllocated=(\d+(?:\.\d*)?)GB, MaxMemAllocated=(\d+(?:\.\d*)?)GB")
MEMORY = re.compile(
    rb"MA (\d+(?:\.\d*)?) GB\s+Max_MA (\d+(?:\.\d*)?) GB\s+CA (\d+(?:\.\d*)?) GB\s+Max_CA (\d+(?:\.\d*)?) GB"
)
PROFILE = re.compile(
    rb"^\s*(?:\S+: )?((?:fwd|bwd|iter|step|params|world size|data parallel|batch size|model parallel)[^:]*):"
    rb"\s+(\d+(?:\.\d*)?) ?([KMGTP]?)\s?(FLOPS|FLOPs|MACs|samples/second|ms|us|s)?\s*$"
)
SECONDS = {b"ms": 1e-3, b"us": 1e-6}
EFFECTIVE = re.compile(rb"Effective Tera Flops per GPU: (\d+(?:\.\d*)?)")


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
            bar = part[-LONGEST_BAR:]
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


def trilane_step(line: bytes) -> dict[str, float] | None:
    """The row of a line of steps.jsonl; None for any other text."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or "iteration" not in values or "sec_per_it" not in values:
        return None
    given = {name: float(value) for name, value in values.items() if _is_number(value)}
    if not {"iteration", "sec_per_it"} <= given.keys():
        return None
    columns = ((*TRILANE.get(name, (name, 1.0)), value) for name, value in given.items())
    return {column: value * factor for column, factor, value in columns}


def trilane_timers(line: bytes) -> dict[str, float]:
    """The timers in a line that trilane_step() reads, in seconds: the maximum over ranks, and the minimum as `<name>
    min`."""
    timers = json.loads(line).get("timers")
    pairs = timers.items() if isinstance(timers, dict) else ()
    whole = {
        name: pair for name, pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))
    }
    return {
        key: float(value) for name, (low, high) in whole.items() for key, value in ((f"{name} min", low), (name, high))
    }


def deepspeed_steps(line: bytes) -> Iterator[dict[str, float]]:
    """Rows of the optimizer steps in a line, from any of three reporters. Step 0, printed at start-up, is left out."""
    for found in STEP.finditer(line):
        if int(found[1]) > 0:
            row = {"iteration": float(found[1]), "skipped_total": float(found[2])}
            yield row | ({"learning_rate": float(found[3])} if found[3] else {})
    for found in PIPELINE.finditer(line):
        names = ("iteration", "lm_loss", "sec_per_it", "samples_per_second")
        yield {name: float(text) for name, text in zip(names, found.groups(), strict=True)}
    for found in THROUGHPUT.finditer(line):
        current = CURRENT.search(line, found.end(), found.end() + 200)
        rate = float(current[1] if current else found[3])
        yield {"iteration": float(found[1] or found[2]), "samples_per_second": rate}


def deepspeed_memories(line: bytes) -> Iterator[dict[str, float]]:
    """Current and peak bytes, as see_memory_usage and the throughput timer print them on rank 0."""
    for found in MEMORY.finditer(line):
        names = ("allocated", "max_allocated", "reserved", "max_reserved")
        yield {name: float(text) * GIB for name, text in zip(names, found.groups(), strict=True)}
    for found in TIMER_MEMORY.finditer(line):
        yield {"allocated": float(found[1]) * GIB, "max_allocated": float(found[2]) * GIB}


def flops_profile(line: bytes) -> tuple[str, float] | None:
    """Name and value of a flops profiler line, in FLOP/s, seconds or a count; None for other lines."""
    found = PROFILE.match(line)
    if not found:
        return None
    value = float(found[2]) * PREFIXES[found[3]] * SECONDS.get(found[4] or b"", 1.0)
    return " ".join(found[1].decode("utf-8", "replace").split()), value


def effective_flops(line: bytes) -> float | None:
    """FLOP/s per GPU, which Megatron with ZeRO-3 prints on the line after an iteration; None for other lines."""
    found = EFFECTIVE.search(line)
    return float(found[1]) * 1e12 if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _float(raw: bytes) -> float | None:
    try:
        return float(raw.replace(b",", b""))
    except ValueError:
        return None
