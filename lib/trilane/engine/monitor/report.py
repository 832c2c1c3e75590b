"""The report of each iteration: Megatron's line on the terminal, a JSON line in steps.jsonl, TensorBoard on request."""

import io
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.distributed.world import World
from trilane.engine.interface import Step
from trilane.engine.monitor.phases import Spread, Timers, timing_table
from trilane.utils.files import Appended
from trilane.workspace import phase_times
from trilane.workspace.run_folder import STEPS, VALIDATION


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration (or the mean of several, ending here), in the units of Megatron's line, times in seconds.

    Its fields are a line of steps.jsonl. A loss that is not a number becomes NaN, which Python's JSON reader accepts.
    `tflops` is model FLOPs per GPU and second by Narayanan's formula (ModelShape.flops_per_iteration), recomputation
    counted where it is full. Megatron-LM of today counts causal attention half and recomputation never.
    """

    iteration: int
    consumed_samples: int
    sec_per_it: float
    tflops: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    loss_scale: float
    grad_norm: float
    skipped: int
    nan: int

    def line(self, train_iters: int, now: datetime) -> str:
        """Megatron-LM's line, training.py of 2025 (training_log), after the time of day."""
        parts = [
            f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {self.iteration:8d}/{train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.sec_per_it * 1000.0:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {self.tflops:.1f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            f"loss scale: {self.loss_scale:.1f}",
            f"grad norm: {self.grad_norm:.3f}",
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d} |",
        ]
        return " | ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One evaluation after `iteration`: the mean loss in nats, and the seconds that it took.

    Its fields are a line of validation.jsonl.
    """

    iteration: int
    consumed_samples: int
    lm_loss: float
    seconds: float

    def lines(self) -> str:
        """What Megatron-LM prints, training.py of 2025 (evaluate_and_print_results), and BigScience's fork."""
        perplexity = math.exp(min(self.lm_loss, 20.0))  # in this order a NaN stays one
        parts = f" validation loss at iteration {self.iteration} | lm loss value: {self.lm_loss:.6E} | "
        parts += f"lm loss PPL: {perplexity:.6E} | "
        rule = "-" * (len(parts) + 1)
        return f"{rule}\n{parts}\n{rule}"


def iteration(plan: Plan, batch: Batch, seconds: float, lr: float, step: Step) -> Iteration:
    """The report of the engine's step over `batch`, which took `seconds`."""
    t = plan.topology
    flops = plan.shape.flops_per_iteration(batch.gbs, recompute_full=t.recompute == "full")
    return Iteration(
        iteration=batch.number,
        consumed_samples=batch.end,
        sec_per_it=seconds,
        tflops=flops / seconds / t.gpus / 1e12,
        learning_rate=lr,
        global_batch_size=batch.gbs,
        lm_loss=step.loss,
        loss_scale=step.loss_scale,
        grad_norm=step.grad_norm,
        skipped=int(step.skipped),
        nan=int(step.loss != step.loss),
    )


def average(window: Sequence[Iteration]) -> Iteration:
    """The iterations since the last line as Megatron prints them: means of time, rate and loss, summed counts."""
    last = window[-1].__dict__
    means = {k: sum(getattr(i, k) for i in window) / len(window) for k in ("sec_per_it", "tflops", "lm_loss")}
    counts = {k: sum(getattr(i, k) for i in window) for k in ("skipped", "nan")}
    return Iteration(**{**last, **means, **counts})


# TensorBoard tag, Megatron-LM's where it has one -> field of Iteration; seconds, and TFLOP/s per GPU.
SCALARS = {
    "lm loss": "lm_loss",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
    "loss-scale": "loss_scale",
    "batch-size": "global_batch_size",
    "consumed-samples": "consumed_samples",
    "iteration-time": "sec_per_it",
    "throughput": "tflops",
}
VALIDATION_SCALAR = "lm loss validation"


class TensorBoard:
    """The event file of a run in its folder `tensorboard/`.

    Not torch's SummaryWriter: its thread ends at the first write that a full disk refuses, and the next flush() waits
    for it for ever.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # its import takes a second
        from tensorboard.summary.writer.record_writer import RecordWriter

        (folder / "tensorboard").mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
        self._file, self._event, self._record = Appended(folder / "tensorboard" / name, print_note), Event, RecordWriter
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Scalars of one iteration by their tags."""
        event = self._event(wall_time=time.time(), step=iteration)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(event)

    def _append(self, event: Any) -> None:
        whole = io.BytesIO()
        self._record(whole).write(event.SerializeToString())
        self._file.write(whole.getvalue())


def print_note(text: str) -> None:
    """Print a line of trilane's own."""
    print(f"trilane: {text}", flush=True)


class TrainingLog:
    """The terminal, steps.jsonl, validation.jsonl and, on request, TensorBoard, by the last rank, which has the loss.

    A full disk does not end the training: what cannot be written is kept for later.
    """

    def __init__(self, plan: Plan, world: World, folder: Path) -> None:
        self._run, self._writes = plan.run, world.is_last
        self._steps, self._evaluations = Appended(folder / STEPS, print_note), Appended(folder / VALIDATION, print_note)
        self._window: list[Iteration] = []
        self._timers = Timers(world.device) if plan.run.timers else None
        if self._timers:
            (folder / "ranks").mkdir(exist_ok=True)
        self._phases = Appended(folder / "ranks" / f"{world.rank}{phase_times.SUFFIX}", print_note)
        self._board = TensorBoard(folder) if plan.run.tensorboard and self._writes else None

    def write(self, step: Iteration) -> None:
        """Append the JSON line; print Megatron's every log_interval iterations and at the end. Collective."""
        due = step.iteration % self._run.log_interval == 0 or step.iteration == self._run.goal
        spread: Spread = {}
        if self._timers:
            self._timers.fold()
            if due:
                self._phases.write(phase_times.line(step.iteration, self._timers.own()))
                spread = self._timers.over_ranks()
        if self._writes:
            self._record(step, spread)
            if due:
                self._print(spread)

    def evaluated(self, validation: Validation) -> None:
        """Append and print an evaluation, which no timer counts; a NaN too."""
        if self._timers:
            self._timers.skip()
        if self._writes:
            self._evaluations.write(json.dumps(validation.__dict__).encode() + b"\n")
            print(validation.lines(), flush=True)
            if self._board:
                self._board.add(validation.iteration, {VALIDATION_SCALAR: validation.lm_loss})

    def close(self) -> None:
        """Write what waits for free space on the disk; report what still cannot be written."""
        self._evaluations.flush()
        self._steps.flush()
        if waiting := self._steps.waiting:
            print_note(f"the last {waiting} iterations are not in steps.jsonl: the disk is full")

    def _record(self, step: Iteration, spread: Spread) -> None:
        values = {**step.__dict__, "timers": spread} if spread else step.__dict__
        self._steps.write(json.dumps(values).encode() + b"\n")
        self._window.append(step)
        if self._board:
            self._board.add(step.iteration, {tag: getattr(step, field) for tag, field in SCALARS.items()})

    def _print(self, spread: Spread) -> None:
        print(average(self._window).line(self._run.train_iters, datetime.now()), flush=True)
        self._window = []
        if spread:
            print(timing_table(spread), flush=True)


def memory_line(rank: int, iterations: int, device: torch.device) -> str:
    """Megatron's report_memory line, in MiB. On a CPU: resident memory for allocated and reserved, its peak for max."""
    if device.type == "cuda":
        names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        allocated, max_allocated, reserved, max_reserved = (getattr(torch.cuda, name)() for name in names)
    else:
        allocated = reserved = resident_bytes()
        max_allocated = max_reserved = peak_resident_bytes()
    values = {
        "allocated": allocated,
        "max allocated": max_allocated,
        "reserved": reserved,
        "max reserved": max_reserved,
    }
    parts = " | ".join(f"{name}: {value / 2**20:.2f}" for name, value in values.items())
    return f"[Rank {rank}] (after {iterations} iterations) memory (MB) | {parts}"


def resident_bytes() -> int:
    """Bytes of this process in memory now; where the system does not report it, the peak."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process in bytes. getrusage(2): kilobytes on Linux, bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
