"""Measurement: what one run's log amounts to: seconds per iteration, tokens, TFLOPs, memory,
loss.
"""

import math
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from trilane.analysis.run_config import RunConfig, counted, of_window, run_config, whole
from trilane.analysis.steady_state import WARM_UP, steady_state
from trilane.config.cluster import Gpu
from trilane.config.plan import Plan, read_plan
from trilane.logs.checks import median, of_card
from trilane.logs.run import RunLog, read_run_folder
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, Record, as_json
from trilane.workspace.status import Status

SIZES = ("parameters", "gpus", "dp", "tp", "pp", "mbs", "gbs")

IN_JSON = {
    "gbs": "global_batch_size",
    "memory_gib": "max_memory_gib",
    "loss": "last_loss",
    "skipped": "skipped_iterations",
}


def rates(config: RunConfig, seconds: float) -> dict[str, float]:
    """FLOP/s per GPU by definition; {} where shape, GPUs, batch or seconds are unknown.

    FLOPs of B sequences of s tokens, L layers, h hidden size, V padded vocabulary:

        narayanan        96 B s L h^2 (1 + s/(6h) + V/(16 L h)) with full recomputation, 72 and 12
                         for 96 and 16 without
        megatron_causal  72 B s L h^2 (1 + s/(12h) + V/(12L h)): half of the scores are masked,
                         nothing is recomputed

    The first is ours: Narayanan et al. 2021, arXiv:2104.04473, equation 3, which Megatron-DeepSpeed
    printed from February 2022 on. The other is `num_floating_point_operations` in training.py of
    Megatron-LM 2025 (core 0.16). Left out by both: norms, softmax, GELU, optimizer.
    """
    shape = config.shape
    gpu_seconds = config.gpus * seconds
    if not (shape and config.gbs > 0 and gpu_seconds > 0):
        return {}
    masked = 6.0 * config.gbs * shape.seq_length**2 * shape.num_layers * shape.query_channels
    flops = shape.flops_per_iteration(config.gbs, config.recompute == "full")
    causal = shape.flops_per_iteration(config.gbs) - masked
    return {"narayanan": flops / gpu_seconds, "megatron_causal": causal / gpu_seconds}


def mfu(config: RunConfig, seconds: float) -> float:
    """The model's FLOPs over the card's peak; NaN where one is unknown.

    Chowdhery et al. 2022, arXiv:2204.02311, appendix B: recomputation does not count, all of the
    attention does. The peak is the data sheet's dense rate in the run's precision. Left out:
    kernels that skip the masked half, boost clocks and power caps.
    """
    shape = config.shape
    peak_flops = config.gpus * config.peak_flops_per_s * seconds
    if not (shape and config.gbs > 0 and peak_flops > 0):
        return math.nan
    return shape.flops_per_iteration(config.gbs) / peak_flops


@frozen
class Measurement(Record):
    """The summary of one run that every command, table and notebook shows; NaN where neither log
    nor plan has a value.

    config          what ran; its `gbs` is that of the window
    iterations      how many count (see steady_state); `left_out` others, by reason
    sec_per_it      their median
    tokens_per_s    of the whole job
    flops_per_s     per GPU by definition (rates, and `printed` where the log has it)
    mfu             where the card is known
    memory_bytes    the fullest rank's peak: reserved, or else allocated
    """

    name: str
    log: RunLog
    config: RunConfig
    left_out: dict[str, int]
    plan: Plan | None = None
    iterations: int
    sec_per_it: float
    tokens_per_s: float
    flops_per_s: dict[str, float] = field(default_factory=dict)
    mfu: float
    memory_bytes: float

    @property
    def status(self) -> Status:
        """How the run ended, or that it runs."""
        return self.log.status

    def row(self) -> Json:
        """The run in base units, memory in GiB, NaN where unknown; what the log shows of its end is
        text.

        `tflops` are per GPU by Narayanan's definition, else as printed.
        `lost` is the share of the printed time that iterations took beyond the median: stalls,
        checkpoints. Without a step of the optimizer were `skipped`, with a NaN `nan_iterations`, as
        the log counts them.
        """
        log = self.log
        printed = self.flops_per_s.get("printed", math.nan)
        later = log.column("sec_per_it")[WARM_UP:]
        beyond = np.maximum(later - self.sec_per_it, 0)
        losses = log.iterations.reindex(columns=["lm_loss"])["lm_loss"].dropna()
        config = self.config
        row = dict.fromkeys(SIZES, math.nan)
        if config.shape:
            row["parameters"] = config.shape.parameters
        for name in SIZES[1:]:
            value = getattr(config, name)
            # where the GPUs are unknown, a degree of parallelism of one is only a default
            if value > 1 or config.gpus or name in ("mbs", "gbs"):
                row[name] = value or math.nan
        causes = [*log.collectives, *log.notes]
        if self.status is not Status.COMPLETED:
            causes.insert(0, log.evidence)
        left_out = [f"{number} ({reason})" for reason, number in self.left_out.items()]
        return row | {
            "memory_gib": self.memory_bytes / 2**30,
            "sec_per_it": self.sec_per_it,
            "tflops": self.flops_per_s.get("narayanan", printed) / 1e12,
            "mfu": self.mfu,
            "lost": np.nansum(beyond) / (np.nansum(later) or math.nan),
            "loss": losses.iloc[-1] if len(losses) else math.nan,
            "tokens_per_s": self.tokens_per_s,
            "iterations": len(log.iterations),
            "first_iteration": log.first_iteration,
            "last_iteration": log.last_iteration,
            "skipped": skipped_iterations(log),
            "nan_iterations": int(np.nansum(log.column("nan"))),
            "status": self.status,
            "dialect": log.dialect,
            "hosts": "; ".join(log.hosts),
            "exclude": log.exclude,
            "cause": "; ".join(causes),
            "problems": "; ".join(map(str, log.problems)),
            "left_out": "; ".join(left_out),
        }

    def to_json(self) -> Json:
        """The row as one JSON object with lists, rates by definition and the log's arguments; null
        where a value is unknown.
        """
        names = ("evidence", "rank", "hosts", "collectives", "arguments", "problems")
        row = {IN_JSON.get(name, name): value for name, value in self.row().items()}
        values = {
            "file": self.log.source,
            **row,
            **{name: getattr(self.log, name) for name in names},
            "iterations_counted": self.iterations,
            "left_out": self.left_out,
            "tflops": {name: rate / 1e12 for name, rate in self.flops_per_s.items()},
            "validation": self.log.validation.to_dict("records"),
            "notes": list(filter(None, (*self.log.notes, self.config.note))),
        }
        return as_json(values)


def measure(folder: Path | str) -> Measurement:
    """The measurement of a run folder, also of one without an iteration.

        measure("outputs/demo/runs/tp1-pp2-dp1").tokens_per_s

    Seconds are those of run.log, to 0.1 ms. A plan of another model than the log's is left out.
    A plan that is none is left out, too.
    """
    log = read_run_folder(folder)
    plan = None
    try:
        plan = read_plan(Path(folder) / "plan.json")
    except ValueError as error:
        log = replace(log, notes=(*log.notes, f"plan.json beside it is not used: {error}"))
    for name in ("num_layers", "hidden_size", "seq_length"):
        if plan and whole(log, name) not in (0, getattr(plan.shape, name)):
            note = f"plan.json beside it is of another model, by {name}: not used"
            log = replace(log, notes=(*log.notes, note))
            plan = None
    return measure_log(log, plan, Path(folder).name)


def measure_log(
    log: RunLog, plan: Plan | None = None, name: str = "", gpu: Gpu | None = None
) -> Measurement:
    """The measurement of one run's log, with its plan where there is one; a log without iterations
    has NaN.

    `gpu` is the card where neither plan nor log names it.
    """
    config = run_config(log, plan, gpu)
    counts, left_out = steady_state(log, config.gbs, config.seq_length)
    config = of_window(config, log, counts)
    seconds = median(log.column("sec_per_it")[counts]) if counts.any() else mean_seconds(log)
    tokens_per_s = 0.0
    if seconds > 0:
        tokens_per_s = config.gbs * config.seq_length / seconds
    computed = rates(config, seconds)
    column = log.column("flops_per_s_per_gpu")
    printed = median(column[1:])  # the first line is of the warm-up
    if math.isnan(printed):
        printed = median(column)
    flops_per_s = {} if math.isnan(printed) else {"printed": printed}
    peak = config.peak_flops_per_s
    if not config.precision:
        peak *= 2.0  # the rate may be of 8 bits, twice that of 16
    problems = of_card(counted(log, "flops_per_s_per_gpu", counts), computed.values(), peak)
    allocated = log.memory.get("max_allocated", math.nan)
    return Measurement(
        name=name or log.source.name,
        log=replace(log, problems=(*log.problems, *problems)),
        config=config,
        left_out=left_out,
        plan=plan,
        iterations=int(counts.sum()),
        sec_per_it=seconds,
        tokens_per_s=tokens_per_s or printed_tokens(log, counts, config.gpus),
        flops_per_s={**flops_per_s, **computed},
        mfu=mfu(config, seconds),
        memory_bytes=log.memory.get("max_reserved", allocated),
    )


def printed_tokens(log: RunLog, counts: np.ndarray, gpus: int) -> float:
    """Tokens per second of the job as the log prints them, where its batch is not known; NaN where
    it prints none.
    """
    if "tokens_per_second" in log.iterations:
        return counted(log, "tokens_per_second", counts)
    return (gpus or math.nan) * counted(log, "tokens_per_gpu_per_second", counts)


def mean_seconds(log: RunLog) -> float:
    """Seconds per iteration of a log that prints none: the Trainer's runtime over its steps, or
    DeepSpeed's batch over its rate; NaN where there is neither.
    """
    runtime = log.totals.get("train_runtime")
    steps = whole(log, "total_optimization_steps")
    if not steps:  # the total of a progress bar
        steps = int(np.nan_to_num(log.column("train_iters")[-1:]).sum())
    if runtime and steps:
        return runtime / steps
    samples = whole(log, "deepspeed.train_batch_size")
    rate = median(log.column("samples_per_second"))
    return samples / rate if samples and rate else math.nan


def skipped_iterations(log: RunLog) -> int:
    """Iterations whose optimizer step was not taken (fp16 overflow)."""
    skipped = log.column("skipped")
    if not np.isfinite(skipped).any():  # DeepSpeed's engine counts those since the start
        total = log.column("skipped_total")
        skipped = total[np.isfinite(total)][-1:]
    return int(np.nansum(skipped))
