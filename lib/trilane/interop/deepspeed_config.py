"""DeepSpeed's JSON of a plan, and the plan of DeepSpeed's JSON."""

from pathlib import Path
from typing import Any

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Optimizer
from trilane.costmodel.columns import columns_of
from trilane.utils.validation import (
    read_object,
    require,
    require_integer,
    require_known,
    shipped_json,
)

NEVER = 10**9  # steps: the engine reports itself
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# of the devices of optimizer and parameters
OFFLOADS = {"none none": "none", "cpu none": "optimizer", "cpu cpu": "full"}


def deepspeed_config(plan: Plan, *, compiler: bool) -> dict[str, Any]:
    """DeepSpeed's JSON object for the plan: `json.dumps(deepspeed_config(read_plan("plan.json"),
    compiler=True))`.

    Without a `compiler`, and with adam=torch, torch's AdamW replaces DeepSpeed's own optimizers,
    which are built at start-up: FusedAdam by nvcc, CPUAdam for offload by a C++ compiler (5 to 7
    times as fast as torch's on the host, by its docstring). A file for a job assumes a compiler;
    the engine checks its nodes and records the JSON that it used.
    """
    optimizer = plan.optimizer
    topology = plan.topology
    adam: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
    }
    config = {
        "train_batch_size": topology.gbs,
        "train_micro_batch_size_per_gpu": topology.mbs,
        "gradient_accumulation_steps": topology.microbatches,
        "gradient_clipping": optimizer.clip_grad,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": _zero(plan),
        **_precision(topology),
        "steps_per_print": NEVER,
    }
    if topology.adam != "fused" or not compiler:
        adam["torch_adam"] = True
        config["zero_force_ds_cpu_optimizer"] = False
        if topology.adam == "fused":
            adam["fused"] = True
    if topology.offload_checkpoints:  # the engine here copies by torch
        inputs = {"cpu_checkpointing": True, "partition_activations": topology.tp > 1}
        config["activation_checkpointing"] = inputs
    if topology.pp > 1:
        # each tensor-parallel rank sends its whole activation, as in Megatron
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    return config


def _zero(plan: Plan) -> dict[str, Any]:
    """Stage, offload, and the buckets that the planner counts (Columns.bucket_values) unless
    DeepSpeed chooses them.

    Stage 3 prefetches 0.9 h^2 values and keeps parameters below 10 h, the values of Hugging Face's
    Trainer for "auto".
    """
    topology = plan.topology
    h = plan.shape.hidden_size
    zero: dict[str, Any] = {"stage": topology.zero}
    if topology.zero > 0:
        zero["overlap_comm"] = topology.overlap_grad_reduce
        if topology.buckets == "layer":
            bucket = int(columns_of(plan.shape, topology).bucket_values)
            zero["reduce_bucket_size"] = bucket
            if topology.zero < 3:
                zero["allgather_bucket_size"] = bucket
            else:
                zero["stage3_prefetch_bucket_size"] = int(0.9 * h * h)
                zero["stage3_param_persistence_threshold"] = 10 * h
    pinned = {"device": "cpu", "pin_memory": plan.cluster.gpu.kind != "cpu"}
    if topology.offload != "none":
        zero["offload_optimizer"] = pinned
    if topology.offload == "full":
        zero["offload_param"] = pinned
    return zero


def _precision(topology: Topology) -> dict[str, Any]:
    """fp16 starts at DeepSpeed's loss scale, 2^16. Stage 1 in bf16 with fp32 gradients is its
    BF16_Optimizer.
    """
    if topology.precision == "fp32":
        return {}
    dtype = "fp32" if topology.fp32_gradients else topology.precision
    return {topology.precision: {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}}


def read_deepspeed(
    path: Path, gpus: int, choices: dict[str, Any]
) -> tuple[dict[str, Any], Optimizer, list[str]]:
    """The choices of a topology in the JSON of `path`, its clipping, and lines for what is "auto",
    unknown or not read: read_deepspeed(Path("ds_config.json"), 8, {"tp": 2}).

    Read are the `defaults` of data/deepspeed_keys.json, which are DeepSpeed 0.19.8's: ZeRO stage,
    offload, precision, batch, overlap, and buckets, which are a layer's in a plan unless they are
    DeepSpeed's. `choices` replace what the JSON has. "auto" is what Hugging Face's `trainer` fills
    in where it has no arguments (integrations/deepspeed.py of transformers 5.24).

    Raises ValueError for keys that DeepSpeed refuses in the `strict` sections, for what no plan
    has, and for what is not JSON (DeepSpeed alone also takes Hjson, which has comments).
    """
    keys = shipped_json("deepspeed_keys")
    values = read_object(path, "deepspeed")
    named = _flat(values, keys["strict"])
    given = {**keys["defaults"]}
    notes = []
    for name, value in named.items():
        if value == "auto":
            value = keys["trainer"].get(name)
            notes.append(f"{name}=auto: {value} by the Trainer's defaults; 0 or None is computed")
        given[name] = value
    if "gradient_clipping" not in named:
        # since its pull request 8068
        notes.append("gradient_clipping=missing: DeepSpeed 0.19.8 clips at 1.0, older ones do not")
    for title, names in {
        "ignored or refused by DeepSpeed": values.keys() - keys["known"],
        "not read": named.keys() - keys["defaults"] - {"zero_optimization.overlap_comm"},
    }.items():
        if names:
            notes.append(f"{title}: {', '.join(sorted(names))}")
    ranks = choices.get("tp", 1) * choices.get("pp", 1)
    rule = f"must be a multiple of tp x pp = {ranks}"
    require(gpus > 0 and gpus % ranks == 0, "gpus", gpus, rule)
    chosen = _choices(given, gpus // ranks) | choices
    return chosen, Optimizer(clip_grad=given["gradient_clipping"]), notes


def _flat(values: dict[str, Any], strict: dict[str, Any], section: str = "") -> dict[str, Any]:
    """All settings by their dotted names, as "zero_optimization.stage"; null is left out."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}.{key}".removeprefix(".")
        require_known(f"{section} key", key, strict.get(section, [key]))
        if isinstance(value, dict):
            flat |= _flat(value, strict, name)
        elif value is not None:
            flat[name] = value
    return flat


def _choices(given: dict[str, Any], dp: int) -> dict[str, Any]:
    """The batch as DeepSpeedConfig._set_batch_related_parameters() has it, but for quotients with a
    remainder; ZeRO, offload and precision.
    """
    for name in BATCH:
        require_integer(name, given[name], 0)
    gbs, mbs, steps = [given[name] for name in BATCH]
    each = dp * max(1, steps)
    mbs = mbs or gbs // each
    gbs = gbs or mbs * each
    require(not steps or gbs == mbs * each, BATCH[0], gbs, f"must be {mbs} x {steps} x dp={dp}")
    devices = [given[f"zero_optimization.offload_{part}.device"] for part in ("optimizer", "param")]
    offload = f"{devices[0]} {devices[1]}"
    require_known("zero_optimization.offload", offload, OFFLOADS)
    enabled = [name for name in ("fp16", "bf16") if given[f"{name}.enabled"]]
    stage = given["zero_optimization.stage"]
    return {
        "mbs": mbs,
        "gbs": gbs,
        "dp": dp,
        "zero": stage,
        "offload": OFFLOADS[offload],
        "precision": "-".join(enabled) or "fp32",
        "fp32_gradients": given["data_types.grad_accum_dtype"] == "fp32",
        "buckets": "library"
        if given["zero_optimization.reduce_bucket_size"] == 500_000_000
        else "layer",
        # None: the engine's default says whether its optimizer can
        "overlap_grad_reduce": None
        if given.get("zero_optimization.overlap_comm", stage == 3)
        else False,
    }
