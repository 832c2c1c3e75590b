"""DeepSpeed's JSON from a plan."""

from typing import Any

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of

NEVER = 10**9  # iterations between the lines that DeepSpeed would print itself


def deepspeed_config(plan: Plan, *, compiler: bool) -> dict[str, Any]:
    """The JSON object that DeepSpeed gets for the plan.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp, as a Topology guarantees.
    Without a `compiler` torch's AdamW stands in for DeepSpeed's own, which it builds when it starts: FusedAdam by nvcc,
    with offload CPUAdam by a C++ compiler (5 to 7 times as fast as torch's on the host, says its docstring). A file for
    a job takes one for granted; the engine tries on its nodes, and writes down what it gave DeepSpeed.
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
        # Each tensor-parallel rank hands over its whole activation, as Megatron does.
        **({"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}} if t.pp > 1 else {}),
        "wall_clock_breakdown": False,
        "steps_per_print": NEVER,
    }


def _zero(plan: Plan) -> dict[str, Any]:
    """Stage, offload and the buckets that the planner counts (Columns.bucket_values), unless they are DeepSpeed's own.

    Stage 3 prefetches 0.9 h^2 and keeps parameters below 10 h, as Hugging Face's Trainer fills in "auto".
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
    if t.offload != "none":
        zero |= {"offload_optimizer": pinned}
    if t.offload == "full":
        zero |= {"offload_param": pinned}
    return zero


def _precision(t: Topology) -> dict[str, Any]:
    """fp16 starts at the loss scale 2^16. Stage 1 in bf16 with fp32 sums is DeepSpeed's BF16_Optimizer."""
    if t.precision == "fp32":
        return {}
    sums = {"data_types": {"grad_accum_dtype": "fp32" if t.fp32_gradients else t.precision}}
    if t.precision == "bf16":
        return {"bf16": {"enabled": True}, **sums}
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}, **sums}
