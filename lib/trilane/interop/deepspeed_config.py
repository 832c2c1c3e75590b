"""DeepSpeed's JSON of a plan."""

from typing import Any

from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel.columns import columns_of

NEVER = 10**9  # steps: the engine reports itself


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
    if topology.zero > 0 and topology.buckets == "layer":
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
