"""DeepSpeed's JSON: written from a plan; a user's one checked, and the topology that it describes."""

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of
from trilane.utils.validation import DATA, read_json, require, require_integer, require_known

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def deepspeed_config(plan: Plan, *, compiler: bool) -> dict[str, Any]:
    """DeepSpeed's JSON object for the plan: `json.dumps(deepspeed_config(read_plan("plan.json"), compiler=True))`.

    Without a `compiler`, torch's AdamW replaces DeepSpeed's own optimizers, which are built at start-up: FusedAdam by
    nvcc, CPUAdam for offload by a C++ compiler (5 to 7 times as fast as torch's on the host, by its docstring). A file
    for a job assumes a compiler; the engine checks its nodes and records the JSON that it used.
    """
    o, t = plan.optimizer, plan.topology
    adam = {"lr": o.lr, "betas": [o.adam_beta1, o.adam_beta2], "eps": o.adam_eps, "weight_decay": o.weight_decay}
    return {
        "train_batch_size": t.gbs,
        "train_micro_batch_size_per_gpu": t.mbs,
        "gradient_accumulation_steps": t.microbatches,
        "gradient_clipping": o.clip_grad,
        "optimizer": {"type": "AdamW", "params": adam if compiler else {**adam, "torch_adam": True}},
        "zero_optimization": _zero(plan),
        **({} if compiler else {"zero_force_ds_cpu_optimizer": False}),
        **_precision(t),
        # each tensor-parallel rank sends its whole activation, as in Megatron
        **({"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}} if t.pp > 1 else {}),
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,  # never: the engine reports itself
    }


def _zero(plan: Plan) -> dict[str, Any]:
    """Stage, offload, and the buckets that the planner counts (Columns.bucket_values) unless DeepSpeed chooses them.

    Stage 3 prefetches 0.9 h^2 values and keeps parameters below 10 h, the values of Hugging Face's Trainer for "auto".
    """
    t, h = plan.topology, plan.shape.hidden_size
    pinned = {"device": "cpu", "pin_memory": plan.cluster.gpu.kind != "cpu"}
    zero: dict[str, Any] = {"stage": t.zero}
    if t.zero > 0:
        zero |= {"overlap_comm": t.pp == 1}
    if t.zero > 0 and t.buckets == "layer":
        bucket = int(columns_of(plan.shape, t).bucket_values)
        zero |= {"reduce_bucket_size": bucket}
        zero |= {"allgather_bucket_size": bucket} if t.zero < 3 else {"stage3_prefetch_bucket_size": int(0.9 * h * h)}
        zero |= {"stage3_param_persistence_threshold": 10 * h} if t.zero == 3 else {}
    zero |= {"offload_optimizer": pinned} if t.offload != "none" else {}
    return zero | ({"offload_param": pinned} if t.offload == "full" else {})


def _precision(t: Topology) -> dict[str, Any]:
    """fp16 starts at loss scale 2^16. Stage 1 in bf16 with fp32 gradients is DeepSpeed's BF16_Optimizer."""
    if t.precision == "fp32":
        return {}
    sums = {"data_types": {"grad_accum_dtype": "fp32" if t.fp32_gradients else t.precision}}
    if t.precision == "bf16":
        return {"bf16": {"enabled": True}, **sums}
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}, **sums}


def contradictions(values: Mapping[str, Any], plan: Plan) -> list[str]:
    """Contradictions of a user's JSON with itself, DeepSpeed or the plan, a line each; empty if there are none.

    Buckets, offload pinning and timers are free. Raises ValueError for a plan whose engine takes no such JSON.
    """
    t = plan.topology
    require(plan.engine != "megatron", "engine", plan.engine, "takes no DeepSpeed JSON")
    # what a plan determines, with DeepSpeed's defaults
    switches = {"fp16.enabled": False, "bf16.enabled": False}
    defaults: dict[str, Any] = {"gradient_clipping": 0.0, "zero_optimization.stage": 0, **switches}
    defaults |= dict.fromkeys((f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param")), "none")
    decided = (*BATCH, *defaults, "data_types.grad_accum_dtype")
    decided += tuple(f"optimizer.params.{name}" for name in ("betas", "eps", "weight_decay"))
    given, planned = ({**defaults, **_flat(found)} for found in (values, deepspeed_config(plan, compiler=True)))
    differ = [n for n in decided if n in planned and given.get(n, "auto") not in ("auto", None, planned[n])]
    lines, _ = meant(values, tp=t.tp, pp=t.pp, dp=t.dp)
    return lines + [f"{name}={given[name]}: the plan has {planned[name]}" for name in differ]


def meant(values: Mapping[str, Any], *, tp: int = 1, pp: int = 1, dp: int = 0) -> tuple[list[str], Topology | None]:
    """What DeepSpeed would refuse or silently ignore, a line each, or else the topology that a user's JSON describes.

    On tp x pp x dp processes; `dp` 0 is what the three batch sizes mean.
    """
    given = {name: value for name, value in _flat(values).items() if value != "auto"}  # that of Hugging Face's Trainer
    lines = unknown_keys(values)
    for name, value in given.items():
        try:
            if name in BATCH:
                require_integer(name, value, 1)
            elif name in ("fp16.enabled", "bf16.enabled"):
                require(isinstance(value, bool), name, repr(value), "must be true or false")
            elif name.startswith("zero_optimization.offload_") and name.endswith(".device"):
                require_known(name, value, ("none", "cpu"))
        except ValueError as error:
            lines.append(str(error))
    try:
        return (lines, None) if lines else ([], _topology(given, tp, pp, dp))
    except ValueError as error:
        return [str(error)], None


def _topology(given: Mapping[str, Any], tp: int, pp: int, dp: int) -> Topology:
    """The topology; a missing batch size is computed as in DeepSpeed. ValueError with the first rule that it breaks."""
    gbs, mbs, steps = (given.get(name) for name in BATCH)
    dp = dp or (max(1, gbs // (mbs * steps)) if gbs and mbs and steps else 1)
    mbs = mbs or (gbs // (dp * (steps or 1)) if gbs else 1)
    steps = steps or (gbs // max(1, dp * mbs) if gbs else 1)
    rule = f"must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp = {mbs} x {steps} x {dp}"
    require(gbs in (None, mbs * steps * dp), BATCH[0], gbs, rule)
    precision, *both = [name for name in ("fp16", "bf16") if given.get(f"{name}.enabled")] or ["fp32"]
    require(not both, "bf16.enabled", True, "fp16 is enabled too")
    sums = precision != "fp32" and given.get("data_types.grad_accum_dtype") == "fp32"
    away = [given.get(f"zero_optimization.offload_{what}.device", "none") == "cpu" for what in ("optimizer", "param")]
    rule = "a plan offloads the optimizer with it"
    require(away[0] or not away[1], "zero_optimization.offload_param.device", "cpu", rule)
    offload, zero = ("none", "optimizer", "full")[sum(away)], given.get("zero_optimization.stage", 0)
    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "mbs": mbs, "gbs": mbs * steps * dp}
    return Topology(**sizes, zero=zero, offload=offload, precision=precision, fp32_gradients=sums)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


@functools.cache
def known_keys() -> dict[str, list[str]]:
    """The keys of each block by its dotted name, "" for the outermost; blocks not listed are not checked.

    Those of optimizer.params hold for Adam and AdamW.
    """
    return read_json(DATA / "deepspeed_keys.json", "keys")["keys"]


def unknown_keys(values: Mapping[str, Any], block: str = "") -> list[str]:
    """A line for each key that DeepSpeed does not know, with the nearest known key: it ignores most of them."""
    known, lines = known_keys(), list[str]()
    adam = str(values.get("type", "AdamW")).lower() in ("adam", "adamw")
    for key, value in values.items():
        name = f"{block}.{key}".lstrip(".")
        is_checked = name in known and (adam or name != "optimizer.params")
        if key not in known[block]:
            close = "".join(f"; did you mean {k}?" for k in difflib.get_close_matches(key, known[block], n=1))
            shown = "{...}" if isinstance(value, Mapping) else value
            lines.append(f"{name}={shown}: DeepSpeed has no such key{close}")
        elif is_checked and isinstance(value, Mapping):
            lines += unknown_keys(value, name)
        elif is_checked and value is not None:
            lines.append(f"{name}={value}: must be a JSON object")
    return lines
