"""Lines of Hugging Face's Trainer, trilane's steps.jsonl, and DeepSpeed: steps, memory, flops profiler."""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np

from trilane.logs.arguments import Value
from trilane.logs.dialects.megatron import PREFIXES, Span, body
from trilane.logs.table import NAN

DICT = re.compile(rb"\{('[^{}]*)\}")
ENTRY = re.compile(rb"'(\w+)': '?(?:[\w.]+\()?([-+]?[\w.+-]+)'?")  # also tensor(1.25, device=..)
OF_TOTAL = re.compile(rb"'global_step/max_steps': '(\d{1,15})/(\d{1,15})'")  # ms-swift's
BAR = re.compile(
    rb"(\d{1,15})/(\d{1,15}) \[(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})<"
)  # tqdm's bar on the same line, with the time passed
OTHER_BAR = re.compile(  # of an evaluation or the data, by its description
    rb"(?i)\b(?:eval|val|valid|test|predict|generat|load|map|filter|tokeniz|download|fetch|sav)[\w ]{0,40}:"
    rb"\s{0,9}\d{1,3}%\|"
)
COUNT = re.compile(
    rb">>\s+(Total optimization steps|Num Epochs|Total train batch size[^=]{0,100}|Num examples) = (\d[\d,]{0,20})"
)
COUNTS = {
    b"Total optimization steps": "total_optimization_steps",
    b"Num examples": "num_examples",
    b"Num Epochs": "num_epochs",
}
STAMP = re.compile(rb"(?:(\d{4})[-/](\d\d)[-/](\d\d)|(\d\d)/(\d\d)/(\d{4}))[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
STAMPED = 4096  # bytes: a line without line ends, of thousands of iterations, is not searched for each of them
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
HF = {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "epoch": "epoch"}
TRILANE = {"tflops": ("flops_per_s_per_gpu", 1e12)}  # other columns have the names of steps.jsonl
# between two dicts with a loss each that a collector of logs, or who pasted them, put on one line
JOINED = re.compile(rb"(?<=\}),?\s{0,2}(?=\{['\"][^{}]{0,4000}\bloss['\"])")
# between two states of a bar on one line: a carriage return, as `cat -v` writes it too, or nothing where it was dropped
REDRAWN = re.compile(rb"\r|\^M|(?<=\])(?=[^\[\]\r]{0,80}\b\d{1,3}%\|)", re.DOTALL)
LONGEST_BAR = 1000  # bytes
MOST_INTERVALS = 1000  # that are tried between two loss dicts
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
    """Seconds since 1970 of the first time stamp in the line, as if it were UTC; NaN if there is none."""
    found = STAMP.search(line, 0, STAMPED)
    if not found:
        return NAN
    year, month, day, month_us, day_us, year_us, hour, minute, second, fraction = found.groups()
    hours, minutes, seconds = int(hour), int(minute), int(second)
    if hours > 23 or minutes > 59 or seconds > 59:
        return NAN
    midnight = _midnight(year or year_us, month or month_us, day or day_us)
    return midnight + (3600 * hours + 60 * minutes + seconds) + (float(b"0." + fraction) if fraction else 0.0)


@lru_cache(16)
def _midnight(year: bytes, month: bytes, day: bytes) -> float:
    """Seconds since 1970 at which the day begins, NaN if there is no such day."""
    try:
        return datetime(int(year), int(month), int(day), tzinfo=UTC).timestamp()
    except ValueError:
        return NAN


def hf_dicts(line: bytes) -> list[dict[str, float]]:
    """The Trainer's dicts in a line, with its names; a progress bar on the line adds `step` and `total`."""
    found = []
    for text in DICT.findall(line):
        values = {name.decode(): number for name, raw in ENTRY.findall(text) if (number := _float(raw)) is not None}
        if "loss" in values or "train_runtime" in values:
            found.append(values)
    if found:
        found[0] |= bar(line)
        if steps := OF_TOTAL.search(line):
            found[0] |= {"step": float(steps[1]), "total": float(steps[2])}
    return found


def bar(line: bytes) -> dict[str, float]:
    """Step, total and elapsed seconds of the progress bar in a line; {} if there is none of the training."""
    if not (found := BAR.search(line)) or OTHER_BAR.search(line[: found.start()]):
        return {}
    passed = 3600 * int(found[3] or 0) + 60 * int(found[4]) + int(found[5])
    return {"step": float(found[1]), "total": float(found[2]), "elapsed": float(passed)}


def has_parts(line: bytes) -> bool:
    """Whether bar_parts() gives several parts."""
    redrawn = b"\r" in line or b"^M" in line or (line.count(b"%|") > 1 and bool(REDRAWN.search(line)))
    return redrawn or (line.count(b"loss") > 1 and line.count(b"{") > 1 and bool(JOINED.search(line)))


def bar_parts(line: bytes) -> list[bytes]:
    """The parts of a line that a progress bar overwrote, or of dicts on one line; a dict is joined with the bar before
    it."""
    parts: list[bytes] = []
    bar = b""
    for part in REDRAWN.split(line):
        if b"{'" in part and bar and not BAR.search(part):
            part = bar + part
        elif BAR.search(part):
            bar = part[-LONGEST_BAR:]
        parts.append(part)
    return [dict_ for part in parts for dict_ in JOINED.split(part)]


def hf_iteration(values: dict[str, float], number: float) -> dict[str, float]:
    """The row of a loss dict, of the iteration of that number."""
    row = {HF[name]: value for name, value in values.items() if name in HF}
    return row | {"iteration": number} | ({"train_iters": values["total"]} if "total" in values else {})


def logging_steps(arguments: Mapping[str, Value], epoch: np.ndarray) -> tuple[int, int]:
    """First iteration, and iterations from one loss dict to the next, of `epoch` where dicts have no step; (0, 0) where
    the log does not show them: one pair alone must give the epochs that are printed, rounded to 0.01 or finer.
    """
    counts = {name: n for name, n in arguments.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}
    total, epochs = counts.get("total_optimization_steps"), counts.get("num_epochs")
    batch, examples = counts.get("total_train_batch_size"), counts.get("num_examples")
    each = total / epochs if total and epochs else examples / batch if examples and batch else NAN  # steps of an epoch
    if not len(epoch) or each != each:
        return 0, 0
    digits = max(2, *(len(repr(float(value)).partition(".")[2]) for value in epoch[:100]))
    rounded = 0.5 * 10.0**-digits + 1e-9
    lines = len(epoch) - 1
    about = (epoch[-1] - epoch[0]) * each / lines if lines else epoch[0] * each
    near = 2 * rounded * each / max(1, lines) + 1
    found = list[tuple[int, int]]()
    for every in range(max(1, int(about - near)), int(min(about + near, about + MOST_INTERVALS)) + 2):
        first = max(1, round(epoch[0] * each / every)) * every
        if (abs((first + every * np.arange(lines + 1)) / each - epoch) <= rounded).all():
            found.append((first, every))
    return found[0] if len(found) == 1 else (0, 0)


def hf_count(line: bytes) -> tuple[str, int] | None:
    """Name (as an argument) and value of a count that the Trainer prints before training; None for other lines."""
    found = COUNT.search(line)
    if not found:
        return None
    return COUNTS.get(found[1].strip(), "total_train_batch_size"), int(found[2].replace(b",", b""))


def trilane_step(line: bytes) -> dict[str, float] | None:
    """The row of a line of steps.jsonl; None for any other text."""
    try:
        values: Any = json.loads(line[line.index(b"{") :])
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
    timers = json.loads(line[line.index(b"{") :]).get("timers")
    pairs = timers.items() if isinstance(timers, dict) else ()
    whole = {
        name: pair for name, pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))
    }
    return {
        key: float(value) for name, (low, high) in whole.items() for key, value in ((f"{name} min", low), (name, high))
    }


def deepspeed_spans(line: bytes) -> Iterator[list[Span]]:
    """The numbers of the optimizer steps in a line, from any of three reporters.

    The rate's reporter counts from the start of the process (`since_start`), the others from the run's first step.
    """
    for found in STEP.finditer(line):
        names = ("iteration", "skipped_total", "learning_rate")
        yield [Span(name, *found.span(i)) for i, name in enumerate(names, 1) if found[i]]
    for found in PIPELINE.finditer(line):
        numbers = ("iteration", "lm_loss", "sec_per_it", "samples_per_second")
        yield [Span(name, *found.span(i)) for i, name in enumerate(numbers, 1)]
    for found in THROUGHPUT.finditer(line):
        current = CURRENT.search(line, found.end(), found.end() + 200)
        rate = current.span(1) if current else found.span(3)
        held = TIMER_MEMORY.search(line, found.end())
        memory = zip(("allocated", "max_allocated"), (1, 2), strict=True) if held else ()
        yield [
            Span("since_start", *found.span(1 if found[1] else 2)),
            Span("samples_per_second", *rate),
            *(Span(name, *held.span(i), GIB) for name, i in memory if held),
        ]


def deepspeed_memories(line: bytes) -> Iterator[dict[str, float]]:
    """Current and peak bytes, as see_memory_usage and the throughput timer print them on rank 0."""
    for found in MEMORY.finditer(line):
        names = ("allocated", "max_allocated", "reserved", "max_reserved")
        yield {name: float(text) * GIB for name, text in zip(names, found.groups(), strict=True)}
    for found in TIMER_MEMORY.finditer(line):
        yield {"allocated": float(found[1]) * GIB, "max_allocated": float(found[2]) * GIB}


def flops_profile(line: bytes) -> tuple[str, float] | None:
    """Name and value of a flops profiler line, in FLOP/s, seconds or a count; None for other lines."""
    found = PROFILE.match(line) or PROFILE.match(body(line))
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
