"""RunConfig: what ran, from the plan or else the log's launch arguments: shape, parallelism, batch,
card.
"""

from dataclasses import replace

import numpy as np

from trilane.config.cluster import Gpu
from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.interop.megatron_parse import Given, shape_of
from trilane.interop.shell_args import printed_arguments
from trilane.logs.checks import median
from trilane.logs.run import RunLog
from trilane.utils.frozen import frozen
from trilane.utils.validation import shipped_json

# Names of one argument, the most reliable first: Megatron's, those of 2020, DeepSpeed's, the
# Trainer's; words of Megatron, its forks (PositionEmbeddingType.alibi) and
# GPT-NeoX for one way of a shape; arguments of models that are no dense decoder with attention over
# the whole sequence.
NAMES = shipped_json("log_arguments")
OFF = ("None", "False", "0", "1", "")  # Megatron-DeepSpeed prints [1] for no experts


@frozen
class RunConfig:
    """What ran. Where unknown: no shape, 0 for a number, "" for the precision, one for a
    degree of parallelism.

    `seq_length` may be known without the shape; `gbs` is sequences per iteration;
    `peak_flops_per_s` the card's matmul rate in the run's precision, of data sheets
    (data/clusters); `note` why there is no shape, where the log shows a model that none describes.
    """

    shape: ModelShape | None = None
    gpus: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 1
    mbs: int = 0
    gbs: float = 0
    seq_length: int = 0
    recompute: str = "none"
    interleaving: int = 1
    precision: str = ""
    peak_flops_per_s: float = 0.0
    note: str = ""


def run_config(log: RunLog, plan: Plan | None = None, gpu: Gpu | None = None) -> RunConfig:
    """The configuration of a run, its full batch size also where it still ramps up: its plan's
    where there is one, else by its log, on `gpu` where that is known.
    """
    if plan:
        return config_of(plan)
    tp = whole(log, *NAMES["tp"]) or 1
    pp = whole(log, *NAMES["pp"]) or 1
    cp = whole(log, "context_parallel_size") or 1
    gpus = whole(log, "world_size", "gpus")
    if not gpus and tp * pp == 1:  # DeepSpeed's own dump counts replicas
        gpus = whole(log, "deepspeed.world_size")
    shape = _shape(log)
    other = shape if isinstance(shape, str) else _indescribable(log, shape)
    chunks = whole(log, "virtual_pipeline_model_parallel_size") or 1
    if per_chunk := whole(log, "num_layers_per_virtual_pipeline_stage"):
        chunks = max(chunks, whole(log, "num_layers") // (pp * per_chunk))
    # the argument where the log reaches or names it, else the largest printed
    printed = np.nan_to_num(log.column("global_batch_size")).max(initial=0)
    precision = _precision(log)
    peak = 0.0
    if gpu and gpu.kind == "cuda":
        peak = getattr(gpu, f"{precision or 'fp16'}_flops_per_s")
    return RunConfig(
        shape=None if isinstance(shape, str) or other else shape,
        note=other and f"no TFLOPs by shape: {other}",
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=whole(log, "data_parallel_size", "dp") or max(1, gpus // (tp * cp * pp)),
        mbs=whole(log, *NAMES["mbs"]),
        gbs=float(max(whole(log, *NAMES["gbs"]), printed)),
        seq_length=whole(log, "seq_length", "encoder_seq_length"),
        recompute=_recompute(log),
        interleaving=chunks,
        precision=precision,
        peak_flops_per_s=peak,
    )


def of_window(config: RunConfig, log: RunLog, counts: np.ndarray) -> RunConfig:
    """The configuration with the batch size and the sequence length of the rows that `counts`
    marks, where it marks any.
    """
    if not counts.any():
        return config
    batch = counted(log, "global_batch_size", counts)
    length = counted(log, "seq_length", counts)
    if batch > 0:
        config = replace(config, gbs=batch)
    if length >= 1:
        shape = config.shape and replace(config.shape, seq_length=int(length))
        config = replace(config, seq_length=int(length), shape=shape)
    return config


def counted(log: RunLog, name: str, counts: np.ndarray) -> float:
    """The median of a column over the rows that count, over all where none does; NaN where none
    prints it.
    """
    values = log.column(name)
    if len(values) and counts.any():
        values = values[counts]
    return median(values)


def config_of(plan: Plan) -> RunConfig:
    """The configuration that a plan describes."""
    topology = plan.topology
    gpu = plan.cluster.gpu
    peak = 0.0
    # a process on a CPU machine has a share of the cores, for which the card's peak means nothing
    if gpu.kind == "cuda":
        peak = gpu.flops_per_s(topology.precision)
    names = ("gpus", "tp", "pp", "dp", "mbs", "gbs", "recompute", "interleaving", "precision")
    return RunConfig(
        shape=plan.shape,
        seq_length=plan.shape.seq_length,
        peak_flops_per_s=peak,
        **{name: getattr(topology, name) for name in names},
    )


def _precision(log: RunLog) -> str:
    if {log.arguments.get("fp8"), log.arguments.get("fp8_format")} & {"hybrid", "e4m3"}:
        return "fp8"
    for name in ("bf16", "fp16"):
        if _is_on(log, name):
            return name
    return ""


def _recompute(log: RunLog) -> str:
    granularity = log.arguments.get("recompute_granularity")
    if granularity in ("full", "selective"):
        return str(granularity)
    if _is_on(log, *NAMES["full_recompute"]):
        return "full"
    return "none"


def _shape(log: RunLog) -> ModelShape | str | None:
    """The model's shape as `convert megatron --read` has it, GPT-NeoX's names for Megatron's; None
    where a size is missing, and what no shape has where all are there.
    """
    renamed = NAMES["renamed"]
    pairs = [(renamed.get(name, name), value) for name, value in log.arguments.items()]
    try:
        return shape_of(Given(printed_arguments(pairs)))
    except ValueError as error:
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
        return str(error) if all(whole(log, name) for name in sizes) else None


def _is_on(log: RunLog, *names: str) -> bool:
    return any(log.arguments.get(name) is True for name in names)


def _indescribable(log: RunLog, shape: ModelShape | None) -> str:
    """The arguments, name=value, of a model that a shape cannot describe; "" where
    there are none.
    """
    given = log.arguments
    names = [name for name in NAMES["no_shape"] if str(given.get(name)).strip("[]()") not in OFF]
    # a number is Megatron's, a list DeepSpeed's
    if shape and shape.experts and type(given["num_experts"]) is int:
        names.remove("num_experts")
    found = ", ".join(f"{name}={given[name]}" for name in names)
    return found and f"none has {found}"


def whole(log: RunLog, *names: str) -> int:
    """The first argument of these names that is a whole number above zero; 0 where
    there is none.
    """
    for name in names:
        value = log.arguments.get(name)
        if type(value) is int and value > 0:
            return value
    return 0
