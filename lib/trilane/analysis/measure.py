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
from trilane.utils.numbers import ranges
from trilane.utils.tables import Record, as_json
from trilane.utils.validation import shipped_json
from trilane.workspace.status import Status

# Timers of Megatron and DeepSpeed by phase, of which the first that fits takes a timer, and those
# that include others.
TIMERS: dict[str, Any] = shipped_json("timers")


def iteration_flops(
    shape: ModelShape, batch: float, tp: int = 1, recompute: str = "none"
) -> dict[str, float]:
    """FLOPs of one iteration of the whole job, by definition.

    B sequences of s tokens, L layers, h hidden size, V padded vocabulary, N parameters, t
    tensor-parallel size:

        narayanan        96 B s L h^2 (1 + s/(6h) + V/(16 L h)) with full recomputation, 72 and 12 for 96 and 16 without
        size_factor      2 N s B, times 4 with full recomputation and 3 without
        replicated       8 s B L (12 h^2 + 13 h + 6 h (t - 1)), whether or not anything is recomputed
        megatron_causal  72 B s L h^2 (1 + s/(12h) + V/(12 L h)): half of the scores are masked, nothing is recomputed

    The first is ours: Narayanan et al. 2021, arXiv:2104.04473, equation 3, which Megatron-DeepSpeed
    printed from February 2022 on. The second is of the BigScience chronicles' tables of 2021; it
    leaves out the attention core. The third was printed before: its ranks' parameters were summed,
    so that norms and row-parallel biases (6 h in GPT-2) count t times and embeddings never; exact
    on the chronicles' 46 rows of 17 and 20 February. The last is `num_floating_point_operations` in
    training.py of Megatron-LM 2025 (core 0.16). Left out by all: norms, softmax, GELU, optimizer.
    """
    s, L, h = shape.seq_length, shape.num_layers, shape.hidden_size
    again = 2 * shape.norm_parameters + 2 * h * (shape.biases == "all")
    return {
        "narayanan": shape.flops_per_iteration(batch, recompute == "full"),
        "size_factor": 2.0 * shape.parameters * (4 if recompute == "full" else 3) * batch * s,
        "replicated": 8.0 * batch * s * L * (shape.layer_parameters + again * (tp - 1)),
        "megatron_causal": shape.flops_per_iteration(batch) - 6.0 * batch * s**2 * L * h,
    }


def rates(config: RunConfig, seconds: float) -> dict[str, float]:
    """FLOP/s per GPU by definition; {} where shape, GPUs, batch or seconds are unknown."""
    shape, batch = config.shape, config.gbs
    if not (shape and config.gpus and batch > 0 and seconds > 0):
        return {}
    found = iteration_flops(shape, batch, config.tp, config.recompute)
    return {name: flops / seconds / config.gpus for name, flops in found.items()}


def utilization(config: RunConfig, seconds: float) -> dict[str, float]:
    """`mfu` and `hfu`: the model's FLOPs, and the hardware's, over the card's peak; {} where one is
    unknown.

    MFU: Chowdhery et al. 2022, arXiv:2204.02311, appendix B: recomputation does not count, all of
    the attention does. HFU counts it: with selective recomputation the attention core once more, 4
    B s^2 L h (Korthikanti et al. 2022, arXiv:2205.05198, section 5). The peak is the data sheet's
    dense rate in the run's precision. Left out: kernels that skip the masked half, boost clocks and
    power caps.
    """
    shape, peak = config.shape, config.gpus * config.peak_flops_per_s
    if not (shape and peak and config.gbs > 0 and seconds > 0):
        return {}
    core = 4.0 * config.gbs * shape.seq_length**2 * shape.num_layers * shape.hidden_size
    executed = shape.flops_per_iteration(config.gbs, config.recompute == "full")
    executed += core * (config.recompute == "selective")
    return {
        "mfu": shape.flops_per_iteration(config.gbs) / (seconds * peak),
        "hfu": executed / (seconds * peak),
    }


def printed_rates(log: RunLog) -> dict[str, float]:
    """`printed`: FLOP/s per GPU as the log has them, the median of its lines by its dialect's own
    definition.
    """
    column = log.column("flops_per_s_per_gpu")
    later = column[1:] if np.isfinite(column[1:]).any() else column
    return {"printed": float(np.nanmedian(later))} if np.isfinite(later).any() else {}


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The summary of one run that every command, table and notebook shows; NaN where neither log
    nor plan has a value.

    config          what ran; its `gbs` is that of the window
    window          which iterations count (see steady_state), `iterations` how many
    sec_per_it      their median; `spread` half the distance of their quartiles relative to it
    tokens_per_s    of the whole job
    flops_per_s     per GPU by definition (iteration_flops, and `printed` where the log has it)
    utilization     mfu and hfu, where the card is known
    lost_share      of the printed time that iterations took beyond the median: stalls, evaluations, checkpoints
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
    spread: float
    tokens_per_s: float
    flops_per_s: dict[str, float] = field(default_factory=dict)
    utilization: dict[str, float] = field(default_factory=dict)
    lost_share: float
    memory_bytes: float
    first_loss: float
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
        """What a table's notes add to the status: an engine not megatron, a rate that is the log's,
        contradictions.
        """
        printed = "narayanan" not in self.flops_per_s and "printed" in self.flops_per_s
        engine = self.plan.engine if self.plan and self.plan.engine != "megatron" else ""
        wrong = ", ".join(dict.fromkeys(problem.column for problem in self.log.problems))
        found = (
            engine,
            "TFLOPs as printed" if printed else "",
            f"contradicted: {wrong}" if wrong else "",
        )
        return ", ".join(filter(None, found))

    @property
    def time_problems(self) -> tuple[Problem, ...]:
        """The log's problems that leave open how long an iteration takes, or what it computes."""
        return tuple(problem for problem in self.log.problems if problem.column not in HARMLESS)

    def to_json(self) -> dict[str, Any]:
        """The run as one JSON object; null where a value is unknown."""
        log, left_out = self.log, self.window.left_out.items()
        names = ["dialect", "status", "evidence", "rank", "hosts", "collectives", "exclude"]
        names += ["arguments", "first_iteration", "last_iteration", "problems"]
        values = {name: getattr(log, name) for name in names} | {
            "file": log.source,
            "caveat": log.caveat,
            "iterations": len(log.iterations),
            "iterations_counted": self.iterations,
            "global_batch_size": self.config.gbs or None,
            "sec_per_it": self.sec_per_it,
            "sec_per_it_spread": self.spread,
            "left_out": [
                {"reason": reason, "iterations": ranges(numbers, 4)} for reason, numbers in left_out
            ],
            "tokens_per_s": self.tokens_per_s,
            "tflops": {name: rate / 1e12 for name, rate in self.flops_per_s.items()},
            "mfu": self.utilization.get("mfu"),
            "hfu": self.utilization.get("hfu"),
            "max_memory_gib": self.memory_bytes / 2**30,
            "last_loss": self.last_loss,
            "validation": log.validation.to_dict("records"),
            "skipped_iterations": self.skipped,
            "nan_iterations": self.nan_iterations,
            "notes": [*log.own, *log.notes, *filter(None, [self.window.note, self.config.note])],
        }
        return as_json(values)


def measure(folder: Path | str, warm_up: int = WARM_UP) -> Measurement:
    """The measurement of a run folder, also of one without an iteration.

        measure("outputs/demo/runs/tp1-pp2-dp1").tokens_per_s

    Seconds are those of run.log, to 0.1 ms. Raises ValueError where the folder holds no plan.
    """
    plan = read_plan(Path(folder) / "plan.json")
    return measure_log(read_run_folder(folder), plan, warm_up, name=Path(folder).name)


def measure_log(
    log: RunLog,
    plan: Plan | None = None,
    warm_up: int = WARM_UP,
    name: str = "",
    gpu: Gpu | None = None,
) -> Measurement:
    """The measurement of one run's log, with its plan where there is one; a log without iterations
    has NaN.

    `gpu` is the card where neither plan nor log names it.
    """
    config = run_config(log, plan, gpu)
    window = steady_state(log, warm_up, config.gbs, config.seq_length)
    config = of_window(config, log, window.counts)
    every, loss, printed = (
        log.column(name) for name in ("sec_per_it", "lm_loss", "flops_per_s_per_gpu")
    )
    counted, loss = every[window.counts[: len(every)]], loss[np.isfinite(loss)]
    low, seconds, high = (
        np.quantile(counted, [0.25, 0.5, 0.75]).tolist()
        if len(counted)
        else [mean_seconds(log)] * 3
    )
    later = every[WARM_UP:][np.isfinite(every[WARM_UP:])]
    computed, is_timed = rates(config, seconds), seconds > 0
    printed = printed[window.counts] if len(printed) and window.counts.any() else printed
    # a rate without a precision may be of 8 bits, twice that of 16
    peak = config.peak_flops_per_s * (1.0 if config.precision else 2.0)
    most = {
        name: float(log.memory[name].max())
        for name in ("max_allocated", "max_reserved")
        if name in log.memory
    }
    wrong = tuple(of_card(median(printed), computed.values(), peak, most, config.card_bytes))
    return Measurement(
        name=name or log.source.name,
        log=replace(log, problems=(*log.problems, *wrong)) if wrong else log,
        config=config,
        window=window,
        plan=plan,
        iterations=len(counted),
        sec_per_it=seconds,
        spread=(high - low) / 2 / seconds if is_timed and len(counted) else math.nan,
        tokens_per_s=(config.gbs * config.seq_length / seconds if is_timed else 0.0)
        or printed_tokens(log, window.counts, config.gpus),
        flops_per_s={**printed_rates(log), **computed},
        utilization=utilization(config, seconds),
        lost_share=float(np.maximum(later - seconds, 0).sum() / later.sum())
        if later.any()
        else math.nan,
        memory_bytes=float(max(memory_by_rank(log).values(), default=math.nan)),
        first_loss=float(loss[0]) if len(loss) else math.nan,
        last_loss=float(loss[-1]) if len(loss) else math.nan,
        skipped=skipped_iterations(log),
        nan_iterations=nan_iterations(log),
    )


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
    batch, rates = log.arguments.get("deepspeed.train_batch_size"), log.column("samples_per_second")
    if "train_runtime" not in log.totals:
        return (
            batch / float(np.nanmedian(rates))
            if len(rates) and isinstance(batch, int)
            else math.nan
        )
    bar = np.nan_to_num(log.column("train_iters")[-1:].sum())  # the total of a progress bar
    steps = log.arguments.get("total_optimization_steps") or bar
    return (
        log.totals["train_runtime"] / steps
        if isinstance(steps, int | float) and steps > 0
        else math.nan
    )


def memory_by_rank(log: RunLog) -> dict[int, float]:
    """Peak bytes of each rank: the most it allocated, else reserved; {} where the log has neither."""
    most = next(
        (
            c
            for c in ("max_allocated", "max_reserved")
            if c in log.memory and log.memory[c].notna().any()
        ),
        None,
    )
    return dict(log.memory.set_index("rank")[most].dropna()) if most else {}


def skipped_iterations(log: RunLog) -> int:
    """Iterations whose optimizer step was not taken (fp16 overflow)."""
    skipped, total = (x[np.isfinite(x)] for x in map(log.column, ("skipped", "skipped_total")))
    return int(
        (skipped if len(skipped) else total[-1:]).sum()
    )  # DeepSpeed's engine counts those since the start


def nan_iterations(log: RunLog) -> int:
    """Those that the framework counts as NaN, or whose loss it prints as NaN; Megatron leaves the
    loss out then.
    """
    its = log.iterations.reindex(columns=["lm_loss", "nan", "skipped", "loss_scale"])
    leaves_out = "lm_loss" in log.iterations and re.search(
        r"megatron|gpt-neox|deepspeedai", log.dialect
    )
    # a line that lacks all that Megatron prints behind the losses was cut
    broken = its["lm_loss"].isna() & its.iloc[:, 1:].notna().any(axis=1) & ~(its["skipped"] > 0)
    return max(int(its["nan"].sum()), int(broken.sum()) if leaves_out else 0)


def phases(log: RunLog, window: SteadyState | None = None) -> dict[str, float]:
    """Median seconds per iteration of each phase by the timers of the printing rank; {} without
    timers.

    With a window, over the iterations that count, where timers were printed for any of them.

    Megatron prints the mean over its log interval. `pipeline_wait` is what that rank spends in
    sends, receives and the all-reduce of the shared embedding: on the last stage these include the
    pipeline's fill and drain, so it is an upper bound of the bubble. `batch-generator` runs inside
    forward-compute and is left out where the log has that.
    """
    timers, found = log.timers, dict[str, float]()
    if window is not None and "iteration" in timers and "iteration" in log.iterations:
        counted = timers[timers["iteration"].isin(log.iterations["iteration"][window.counts])]
        timers = counted if len(counted) else timers
    medians = timers.drop(columns="iteration", errors="ignore").median().dropna()
    for name, seconds in medians.items():
        inner = TIMERS["include"].get(name, "$^")
        includes = re.search(TIMERS["include_others"], name) or any(
            re.search(inner, other) for other in medians.index
        )
        phase = next(
            (p for p, pattern in TIMERS["phases"].items() if re.search(pattern, name)), None
        )
        # one that includes others that were printed too would count them twice
        if phase and not includes and not (phase == "data" and "forward-compute" in medians):
            found[phase] = found.get(phase, 0.0) + float(seconds)
    return {name: found[name] for name in TIMERS["phases"] if name in found}
