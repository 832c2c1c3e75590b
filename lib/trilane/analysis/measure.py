"""Measurement: what one run's log amounts to: seconds per iteration, tokens, TFLOPs, memory, loss,
phases.
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trilane.analysis.run_config import RunConfig, of_window, run_config
from trilane.analysis.steady_state import WARM_UP, SteadyState, steady_state
from trilane.config.cluster import Gpu
from trilane.config.model import ModelShape
from trilane.config.plan import Plan, read_plan
from trilane.logs.checks import HARMLESS, Problem, median, of_card
from trilane.logs.run import RunLog, read_run_folder
from trilane.utils.tables import Record, as_json
from trilane.utils.validation import shipped_json
from trilane.workspace.status import Status

# Timers of Megatron and DeepSpeed by phase, of which the first that fits takes a timer, and those
# that include others.
TIMERS: dict[str, Any] = shipped_json("timers")


def iteration_flops(shape: ModelShape, batch: float, recompute: str = "none") -> dict[str, float]:
    """FLOPs of one iteration of the whole job, by definition.

    B sequences of s tokens, L layers, h hidden size, V padded vocabulary:

        narayanan        96 B s L h^2 (1 + s/(6h) + V/(16 L h)) with full recomputation, 72 and 12
                         for 96 and 16 without
        megatron_causal  72 B s L h^2 (1 + s/(12h) + V/(12 L h)): half of the scores are masked,
                         nothing is recomputed

    The first is ours: Narayanan et al. 2021, arXiv:2104.04473, equation 3, which Megatron-DeepSpeed
    printed from February 2022 on. The other is `num_floating_point_operations` in training.py of
    Megatron-LM 2025 (core 0.16). Left out by both: norms, softmax, GELU, optimizer.
    """
    masked = 6.0 * batch * shape.seq_length**2 * shape.num_layers * shape.hidden_size
    return {
        "narayanan": shape.flops_per_iteration(batch, recompute == "full"),
        "megatron_causal": shape.flops_per_iteration(batch) - masked,
    }


def rates(config: RunConfig, seconds: float) -> dict[str, float]:
    """FLOP/s per GPU by definition; {} where shape, GPUs, batch or seconds are unknown."""
    if not (config.shape and config.gpus and config.gbs > 0 and seconds > 0):
        return {}
    flops = iteration_flops(config.shape, config.gbs, config.recompute)
    return {name: number / seconds / config.gpus for name, number in flops.items()}


def utilization(config: RunConfig, seconds: float) -> dict[str, float]:
    """`mfu` and `hfu`: the model's FLOPs, and the hardware's, over the card's peak; {} where one is
    unknown.

    MFU: Chowdhery et al. 2022, arXiv:2204.02311, appendix B: recomputation does not count, all of
    the attention does. HFU counts it: with selective recomputation the attention core once more, 4
    B s^2 L h (Korthikanti et al. 2022, arXiv:2205.05198, section 5). The peak is the data sheet's
    dense rate in the run's precision. Left out: kernels that skip the masked half, boost clocks and
    power caps.
    """
    shape = config.shape
    peak = config.gpus * config.peak_flops_per_s
    if not (shape and peak and config.gbs > 0 and seconds > 0):
        return {}
    executed = shape.flops_per_iteration(config.gbs, config.recompute == "full")
    if config.recompute == "selective":
        executed += 4.0 * config.gbs * shape.seq_length**2 * shape.num_layers * shape.hidden_size
    return {
        "mfu": shape.flops_per_iteration(config.gbs) / (seconds * peak),
        "hfu": executed / (seconds * peak),
    }


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The summary of one run that every command, table and notebook shows; NaN where neither log
    nor plan has a value.

    config          what ran; its `gbs` is that of the window
    window          which iterations count (see steady_state), `iterations` how many
    sec_per_it      their median
    tokens_per_s    of the whole job
    flops_per_s     per GPU by definition (iteration_flops, and `printed` where the log has it)
    utilization     mfu and hfu, where the card is known
    lost_share      of the printed time that iterations took beyond the median: stalls, checkpoints
    memory_bytes    the fullest rank's peak
    skipped, nan_iterations     over the whole log: without a step of the optimizer, with a NaN
    """

    name: str
    log: RunLog
    config: RunConfig
    window: SteadyState
    plan: Plan | None = None
    iterations: int
    sec_per_it: float
    tokens_per_s: float
    flops_per_s: dict[str, float] = field(default_factory=dict)
    utilization: dict[str, float] = field(default_factory=dict)
    lost_share: float
    memory_bytes: float
    last_loss: float
    skipped: int
    nan_iterations: int

    @property
    def status(self) -> Status:
        """How the run ended, or that it runs."""
        return self.log.status

    @property
    def flops_per_s_per_gpu(self) -> float:
        """By Narayanan's definition; the printed rate where the shape is unknown, NaN where there
        is neither.
        """
        return self.flops_per_s.get("narayanan", self.flops_per_s.get("printed", math.nan))

    @property
    def note(self) -> str:
        """What a table's notes add to the status: the columns that contradict others."""
        columns = dict.fromkeys(problem.column for problem in self.log.problems)
        return f"contradicted: {', '.join(columns)}" if columns else ""

    @property
    def time_problems(self) -> tuple[Problem, ...]:
        """The log's problems that leave open how long an iteration takes, or what it computes."""
        return tuple(problem for problem in self.log.problems if problem.column not in HARMLESS)

    def to_json(self) -> dict[str, Any]:
        """The run as one JSON object; null where a value is unknown."""
        names = ["dialect", "status", "evidence", "rank", "hosts", "collectives", "exclude"]
        names += ["arguments", "first_iteration", "last_iteration", "problems"]
        values = {name: getattr(self.log, name) for name in names}
        notes = [*self.log.notes, self.config.note]
        values |= {
            "file": self.log.source,
            "iterations": len(self.log.iterations),
            "iterations_counted": self.iterations,
            "left_out": self.window.left_out,
            "global_batch_size": self.config.gbs or None,
            "sec_per_it": self.sec_per_it,
            "tokens_per_s": self.tokens_per_s,
            "tflops": {name: rate / 1e12 for name, rate in self.flops_per_s.items()},
            "mfu": self.utilization.get("mfu"),
            "hfu": self.utilization.get("hfu"),
            "max_memory_gib": self.memory_bytes / 2**30,
            "last_loss": self.last_loss,
            "validation": self.log.validation.to_dict("records"),
            "skipped_iterations": self.skipped,
            "nan_iterations": self.nan_iterations,
            "notes": [note for note in notes if note],
        }
        return as_json(values)


def measure(folder: Path | str) -> Measurement:
    """The measurement of a run folder, also of one without an iteration.

        measure("outputs/demo/runs/tp1-pp2-dp1").tokens_per_s

    Seconds are those of run.log, to 0.1 ms. Raises ValueError where the folder holds no plan.
    """
    plan = read_plan(Path(folder) / "plan.json")
    return measure_log(read_run_folder(folder), plan, Path(folder).name)


def measure_log(
    log: RunLog, plan: Plan | None = None, name: str = "", gpu: Gpu | None = None
) -> Measurement:
    """The measurement of one run's log, with its plan where there is one; a log without iterations
    has NaN.

    `gpu` is the card where neither plan nor log names it.
    """
    config = run_config(log, plan, gpu)
    window = steady_state(log, config.gbs, config.seq_length)
    config = of_window(config, log, window.counts)
    times = log.column("sec_per_it")
    counted = times[window.counts[: len(times)]]
    seconds = median(counted) if len(counted) else mean_seconds(log)
    tokens_per_s = 0.0
    if seconds > 0:
        tokens_per_s = config.gbs * config.seq_length / seconds
    later = times[WARM_UP:]
    later = later[np.isfinite(later)]
    lost_share = math.nan
    if later.any():
        lost_share = float(np.maximum(later - seconds, 0).sum() / later.sum())
    loss = log.column("lm_loss")
    loss = loss[np.isfinite(loss)]
    computed = rates(config, seconds)
    column = log.column("flops_per_s_per_gpu")
    printed = median(column[1:])  # the first line is of the warm-up
    if math.isnan(printed):
        printed = median(column)
    flops_per_s = {} if math.isnan(printed) else {"printed": printed}
    problems = _card_problems(log, config, window, computed)
    return Measurement(
        name=name or log.source.name,
        log=replace(log, problems=(*log.problems, *problems)),
        config=config,
        window=window,
        plan=plan,
        iterations=len(counted),
        sec_per_it=seconds,
        tokens_per_s=tokens_per_s or printed_tokens(log, window.counts, config.gpus),
        flops_per_s={**flops_per_s, **computed},
        utilization=utilization(config, seconds),
        lost_share=lost_share,
        memory_bytes=float(max(memory_by_rank(log).values(), default=math.nan)),
        last_loss=float(loss[-1]) if len(loss) else math.nan,
        skipped=skipped_iterations(log),
        nan_iterations=nan_iterations(log),
    )


def _card_problems(
    log: RunLog, config: RunConfig, window: SteadyState, computed: dict[str, float]
) -> list[Problem]:
    """Rates of the log that the shape or the card contradict."""
    printed = log.column("flops_per_s_per_gpu")
    if len(printed) and window.counts.any():
        printed = printed[window.counts]
    peak = config.peak_flops_per_s
    if not config.precision:
        peak *= 2.0  # the rate may be of 8 bits, twice that of 16
    return list(of_card(median(printed), computed.values(), peak))


def printed_tokens(log: RunLog, counts: np.ndarray, gpus: int) -> float:
    """Tokens per second of the job as the log prints them, where its batch is not known; NaN where
    it prints none.
    """
    for name, ranks in (("tokens_per_second", 1), ("tokens_per_gpu_per_second", gpus)):
        printed = log.column(name)
        if len(printed) and ranks:
            return ranks * median(printed[counts] if counts.any() else printed)
    return math.nan


def mean_seconds(log: RunLog) -> float:
    """Seconds per iteration of a log that prints none: the Trainer's runtime over its steps, or
    DeepSpeed's batch over its rate; NaN where there is neither.
    """
    if "train_runtime" in log.totals:
        steps = log.arguments.get("total_optimization_steps")
        if not steps:  # the total of a progress bar
            steps = float(np.nan_to_num(log.column("train_iters")[-1:].sum()))
        if isinstance(steps, int | float) and steps > 0:
            return log.totals["train_runtime"] / steps
        return math.nan
    batch = log.arguments.get("deepspeed.train_batch_size")
    samples_per_s = log.column("samples_per_second")
    if isinstance(batch, int) and len(samples_per_s):
        return batch / float(np.nanmedian(samples_per_s))
    return math.nan


def memory_by_rank(log: RunLog) -> dict[int, float]:
    """Peak bytes of each rank: the most it allocated, else reserved; {} where the log
    has neither.
    """
    for name in ("max_allocated", "max_reserved"):
        if name in log.memory and log.memory[name].notna().any():
            return dict(log.memory.set_index("rank")[name].dropna())
    return {}


def skipped_iterations(log: RunLog) -> int:
    """Iterations whose optimizer step was not taken (fp16 overflow)."""
    skipped = log.column("skipped")
    if not np.isfinite(skipped).any():  # DeepSpeed's engine counts those since the start
        total = log.column("skipped_total")
        skipped = total[np.isfinite(total)][-1:]
    return int(np.nansum(skipped))


def nan_iterations(log: RunLog) -> int:
    """Those that the framework counts as NaN, or whose loss it prints as NaN; Megatron leaves the
    loss out then.
    """
    table = log.iterations.reindex(columns=["lm_loss", "nan", "skipped", "loss_scale"])
    counts = table["nan"]
    counted = int(counts[np.isfinite(counts)].sum())
    leaves_out = re.search(r"megatron|gpt-neox|deepspeedai", log.dialect)
    if not leaves_out or "lm_loss" not in log.iterations:
        return counted
    # a line that lacks all that Megatron prints behind the losses was cut
    is_whole = table[["nan", "skipped", "loss_scale"]].notna().any(axis=1)
    is_broken = table["lm_loss"].isna() & is_whole & ~(table["skipped"] > 0)
    return max(counted, int(is_broken.sum()))


def phases(run: Measurement) -> dict[str, float]:
    """Median seconds per iteration of each phase by the timers of the printing rank, over the
    iterations that count where timers were printed for any of them; {} without timers.

    Megatron prints the mean over its log interval. `pipeline_wait` is what that rank spends in
    sends, receives and the all-reduce of the shared embedding: on the last stage these include the
    pipeline's fill and drain, so it is an upper bound of the bubble. `batch-generator` runs inside
    forward-compute and is left out where the log has that.
    """
    timers = run.log.timers
    if "iteration" in timers and "iteration" in run.log.iterations:
        counted = timers["iteration"].isin(run.log.iterations["iteration"][run.window.counts])
        timers = timers[counted] if counted.any() else timers
    medians = timers.drop(columns="iteration", errors="ignore").median().dropna()
    seconds = dict.fromkeys(TIMERS["phases"], 0.0)
    for name, median_s in medians.items():
        fitting = [p for p, pattern in TIMERS["phases"].items() if re.search(pattern, name)]
        # a timer that includes others that were printed too would count them twice
        is_sum = bool(re.search(TIMERS["include_others"], name))
        if name in TIMERS["include"]:
            is_sum = len(medians.filter(regex=TIMERS["include"][name])) > 0
        if fitting and not is_sum:
            seconds[fitting[0]] += float(median_s)
    if "forward-compute" in medians:
        seconds["data"] = 0.0
    return {phase: value for phase, value in seconds.items() if value}
