"""DeepSpeed's JSON of a plan."""

from typing import Any

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of


def deepspeed_config(plan: Plan, *, compiler: bool) -> dict[str, Any]:
    """DeepSpeed's JSON object for the plan: `json.dumps(deepspeed_config(read_plan("plan.json"),
    compiler=True))`.

    Without a `compiler`, and with adam=torch, torch's AdamW replaces DeepSpeed's own optimizers,
    which are built at start-up: FusedAdam by nvcc, CPUAdam for offload by a C++ compiler (5 to 7
    times as fast as torch's on the host, by its docstring). A file for a job assumes a compiler;
    the engine checks its nodes and records the JSON that it used.
    """
    o, t = plan.optimizer, plan.topology
    adam = {
        "lr": o.lr,
        "betas": [o.adam_beta1, o.adam_beta2],
        "eps": o.adam_eps,
        "weight_decay": o.weight_decay,
    }
    own, fused = compiler and t.adam == "fused", {"fused": True} if t.adam == "fused" else {}
    return {
        "train_batch_size": t.gbs,
        "train_micro_batch_size_per_gpu": t.mbs,
        "gradient_accumulation_steps": t.microbatches,
        "gradient_clipping": o.clip_grad,
        "optimizer": {
            "type": "AdamW",
            "params": adam if own else {**adam, "torch_adam": True, **fused},
        },
        "zero_optimization": _zero(plan),
        **({} if own else {"zero_force_ds_cpu_optimizer": False}),
        **_precision(t),
        # each tensor-parallel rank sends its whole activation, as in Megatron
        **(
            {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}} if t.pp > 1 else {}
        ),
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,  # never: the engine reports itself
    }


def _zero(plan: Plan) -> dict[str, Any]:
    """Stage, offload, and the buckets that the planner counts (Columns.bucket_values) unless
    DeepSpeed chooses them.

    Stage 3 prefetches 0.9 h^2 values and keeps parameters below 10 h, the values of Hugging Face's
    Trainer for "auto".
    """
    t, h = plan.topology, plan.shape.hidden_size
    pinned = {"device": "cpu", "pin_memory": plan.cluster.gpu.kind != "cpu"}
    zero: dict[str, Any] = {"stage": t.zero}
    if t.zero > 0:
        zero |= {"overlap_comm": t.overlap_grad_reduce}
    if t.zero > 0 and t.buckets == "layer":
        bucket = int(columns_of(plan.shape, t).bucket_values)
        zero |= {"reduce_bucket_size": bucket}
        zero |= (
            {"allgather_bucket_size": bucket}
            if t.zero < 3
            else {"stage3_prefetch_bucket_size": int(0.9 * h * h)}
        )
        zero |= {"stage3_param_persistence_threshold": 10 * h} if t.zero == 3 else {}
    zero |= {"offload_optimizer": pinned} if t.offload != "none" else {}
    return zero | ({"offload_param": pinned} if t.offload == "full" else {})


def _precision(t: Topology) -> dict[str, Any]:
    """fp16 starts at loss scale 2^16. Stage 1 in bf16 with fp32 gradients is DeepSpeed's
    BF16_Optimizer.
    """
    if t.precision == "fp32":
        return {}
    sums = {"data_types": {"grad_accum_dtype": "fp32" if t.fp32_gradients else t.precision}}
    if t.precision == "bf16":
        return {"bf16": {"enabled": True}, **sums}
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}, **sums}
