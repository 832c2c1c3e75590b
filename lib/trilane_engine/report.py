"""The report of each iteration: Megatron's line on the terminal, a JSON line in steps.jsonl."""

import json
import math
import platform
import resource
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.utils.files import Appended, replace_text
from trilane_engine import heartbeat
from trilane_engine.backends.base import Step
from trilane_engine.phases import Timers, timing_line
from trilane_engine.world import World

Line = dict[str, Any]  # of steps.jsonl, one iteration


def iteration(plan: Plan, batch: Batch, seconds: float, lr: float, step: Step) -> Line:
    """The line of the engine's step over `batch`, in the units of Megatron's line, times in
    seconds.

    `tflops` is model FLOPs per GPU and second by Narayanan's formula
    (ModelShape.flops_per_iteration), recomputation counted where it is full. Megatron-LM of today
    counts causal attention half and recomputation never. `imbalance` is of models with experts.
    """
    t = plan.topology
    flops = plan.shape.flops_per_iteration(batch.gbs, recompute_full=t.recompute == "full")
    line = {
        "iteration": batch.number,
        "consumed_samples": batch.end,
        "sec_per_it": seconds,
        "tflops": flops / seconds / t.gpus / 1e12,
        "learning_rate": lr,
        "global_batch_size": batch.gbs,
        "lm_loss": step.loss,  # NaN where it is not a number, which Python's JSON reader accepts
        "loss_scale": step.loss_scale,
        "grad_norm": step.grad_norm,
        "skipped": int(step.skipped),
        "nan": int(math.isnan(step.loss)),
    }
    if plan.shape.experts:
        line["imbalance"] = step.imbalance
    return line


def megatron_line(window: Sequence[Line], train_iters: int, now: datetime) -> str:
    """Megatron-LM's line, training.py of 2025 (training_log), after the time of day.

    Of several iterations, those since the last line, it has means of time, rate and loss, and
    summed counts.
    """
    last = window[-1]
    total = {name: sum(line[name] for line in window) for name in last}
    count = len(window)
    return (
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {last['iteration']:8d}/{train_iters:8d} | "
        f"consumed samples: {last['consumed_samples']:12d} | "
        f"elapsed time per iteration (ms): {total['sec_per_it'] / count * 1000.0:.1f} | "
        f"throughput per GPU (TFLOP/s/GPU): {total['tflops'] / count:.1f} | "
        f"learning rate: {last['learning_rate']:.6E} | "
        f"global batch size: {last['global_batch_size']:5d} | "
        f"lm loss: {total['lm_loss'] / count:.6E} | loss scale: {last['loss_scale']:.1f} | "
        f"grad norm: {last['grad_norm']:.3f} | "
        f"number of skipped iterations: {total['skipped']:3d} | "
        f"number of nan iterations: {total['nan']:3d} |"
    )


def write_json(path: Path, values: Any) -> None:
    """Write `values` as indented JSON under a temporary name, then rename: a reader never sees a
    partial file.
    """
    replace_text(path, json.dumps(values, indent=2) + "\n")


class TrainingLog:
    """The terminal, steps.jsonl and validation.jsonl, by the last rank."""

    def __init__(self, plan: Plan, world: World, folder: Path) -> None:
        self._run = plan.run
        self._writes = world.is_last
        self._window = list[Line]()
        self._steps = Appended(folder / "steps.jsonl")
        self._evaluations = Appended(folder / "validation.jsonl")
        self._timers = Timers(world.device) if plan.run.timers or plan.run.hang_timeout_s else None
        (folder / "ranks").mkdir(exist_ok=True)
        self._phases = Appended(folder / "ranks" / f"{world.rank}.phases")

    def write(self, line: Line, saving: bool) -> None:
        """Append the JSON line; print Megatron's every log_interval iterations and at the end.

        While a save is being written (`saving`) an iteration says nothing about the run's pace.
        """
        by_phase = self._timers.fold() if self._timers else {}
        if not saving:
            heartbeat.iterated(line["global_batch_size"], line["sec_per_it"], by_phase)
        number = line["iteration"]
        is_due = number % self._run.log_interval == 0 or number == self._run.goal
        self._window.append(line)
        seconds: dict[str, float] = {}
        if is_due and self._run.timers and self._timers:
            seconds = self._timers.taken()
            values = {"iteration": number, "host": platform.node(), "seconds": seconds}
            self._phases.write(json.dumps(values).encode() + b"\n")
        if self._writes:
            self._steps.write(json.dumps(line).encode() + b"\n")
            if is_due:
                now = datetime.now()
                print(megatron_line(self._window, self._run.train_iters, now), flush=True)
            if seconds:
                print(timing_line(seconds), flush=True)
        if is_due:
            self._window.clear()

    def evaluated(self, batch: Batch, loss: float) -> None:
        """Append and print the validation loss after `batch`, in nats; no timer counts
        its time.
        """
        if self._timers:
            self._timers.skip()
        if self._writes:
            values: Line = {"iteration": batch.number, "consumed_samples": batch.end}
            values["lm_loss"] = loss
            self._evaluations.write(json.dumps(values).encode() + b"\n")
            print(validation_line(batch.number, loss), flush=True)

    def close(self) -> None:
        """Write what waits for free space on the disk."""
        self._evaluations.write(b"")
        self._steps.write(b"")


def validation_line(iteration: int, loss: float) -> str:
    """Megatron-LM's line, training.py of 2025 (evaluate_and_print_results), without its rules."""
    perplexity = math.exp(min(loss, 20.0))  # in this order a NaN stays one
    text = f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
    return f"{text}lm loss PPL: {perplexity:.6E} | "


def memory_line(rank: int, iterations: int, device: torch.device) -> str:
    """Megatron's report_memory line, in MiB. On a CPU: resident memory for allocated and reserved,
    its peak for max.
    """
    if device.type == "cuda":
        held = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        held += [torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()]
    else:
        held = [psutil.Process().memory_info().rss, peak_resident_bytes()] * 2
    names = ("allocated", "max allocated", "reserved", "max reserved")
    parts = [f"{name}: {size / 2**20:.2f}" for name, size in zip(names, held, strict=True)]
    return f"[Rank {rank}] (after {iterations} iterations) memory (MB) | {' | '.join(parts)}"


def peak_resident_bytes() -> int:
    """Peak resident memory of this process in bytes. getrusage(2): kilobytes on Linux, bytes on
    macOS.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024
