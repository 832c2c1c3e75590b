"""The engines that can train a plan: what each supports, and which choices it makes where a plan
leaves them open.

The defaults of a run have their one place here: precision, attention kernel, gradient sums and ZeRO
stage.
"""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.options import Rules, first_broken
from trilane.config.parallelism import RECOMPUTE, SINGLE, Topology
from trilane.config.shapes import nearest_family
from trilane.utils.validation import require, shipped_json

ENGINES = ("megatron", "deepspeed-zero", "deepspeed-3d", "hf-zero3")


def default_precision(cluster: Cluster) -> str:
    """bf16 where the card has it, else fp16, and fp32 on a CPU."""
    if cluster.gpu.kind == "cpu":
        return "fp32"
    if cluster.gpu.bf16_flops_per_s:
        return "bf16"
    return "fp16"


def default_attention(
    shape: ModelShape, cluster: Cluster, precision: str, engine: str = ENGINES[0]
) -> str:
    """ "fused" where torch's scaled_dot_product_attention has a kernel that keeps no s x s scores,
    else "scores".

    On a GPU such kernels (flash from Ampere on, memory-efficient on a V100) want 16 bits and heads
    of a multiple of 8 channels, 256 at most. A CPU has one for every head. transformers' BLOOM has
    none.
    """
    if engine == "hf-zero3" and shape.positions == "alibi":
        return "scores"
    if cluster.gpu.kind == "cpu":
        return "fused"
    # the largest head of FlashAttention 2 (its README, 'head dimension up to 256')
    fits = precision != "fp32" and shape.head_dim % 8 == 0 and shape.head_dim <= 256
    return "fused" if fits else "scores"


def default_fp32_gradients(precision: str, offload: str = "none") -> bool:
    """bf16 sums its gradients in fp32: its 8 bits of mantissa lose what many microbatches add.
    Offload has no such sum.

    DeepSpeed's BF16_Optimizer and Megatron-LM's --bf16 do so by default. With fp8 and fp4
    gradients are those of bf16.
    """
    return precision in ("bf16", "fp8", "fp4") and offload == "none"


def sums_in_fp32(engine: str, topology: Topology) -> bool:
    """Whether 16-bit gradients are summed in fp32: by choice, and always in Megatron's
    DistributedDataParallel.
    """
    return topology.precision != "fp32" and (topology.fp32_gradients or engine == "megatron")


def default_topology(
    shape: ModelShape, cluster: Cluster, engine: str = ENGINES[0], **chosen: Any
) -> Topology:
    """The topology of the choices given, with the cluster's and the engine's defaults for the
    others.

    `zero` is 1 where several replicas train in 16 bits, since an optimizer of 12 bytes a parameter
    is worth dividing, and in DeepSpeed's engines, which have no stage 0; those without a pipeline
    sum in the backward pass where they can.
    """
    given = {name: value for name, value in chosen.items() if value is not None}
    precision = given.get("precision") or default_precision(cluster)
    several = given.get("dp", 1) > 1
    values: dict[str, Any] = {
        "precision": precision,
        "attention": default_attention(shape, cluster, precision, engine),
        "fp32_gradients": default_fp32_gradients(precision, given.get("offload", "none")),
        "zero": int(engine != "megatron" or (precision != "fp32" and several)),
    }
    topology = Topology(**values | given)
    # DeepSpeed's overlap_comm, which its pipelines do not have
    overlaps = engine in ("deepspeed-zero", "hf-zero3") and several
    overlaps = overlaps and not has_bf16_optimizer(topology)
    return Topology(**values | {"overlap_grad_reduce": overlaps} | given)


def has_bf16_optimizer(t: Any) -> Any:
    """Whether DeepSpeed trains it by BF16_Optimizer, which holds fp32 sums and reduces after the
    last microbatch.
    """
    is_bf16 = (t.zero == 1) & (t.precision == "bf16")
    return is_bf16 & t.fp32_gradients


def label_of(shape: ModelShape, cluster: Cluster, topology: Topology, engine: str) -> str:
    """The topology's label, and every choice beyond the defaults of cluster and engine: no two
    plans share one.

    Of one shape, cluster and batch size, that is; a label names none of these.
    """
    t = topology
    words = [t.label]
    if t.precision != default_precision(cluster):
        words.append(t.precision)
    if t.attention != default_attention(shape, cluster, t.precision, engine):
        words.append(t.attention)
    sums = sums_in_fp32(engine, t)
    usual = engine == "megatron" or default_fp32_gradients(t.precision, t.offload)
    if t.precision != "fp32" and sums != usual:
        words.append("fp32grads" if sums else f"{t.precision}grads")
    if engine != ENGINES[0]:
        words.append(engine)
    return "-".join(words)


def release(package: str) -> tuple[int, int] | None:
    """The first two numbers of the installed version of a package; None where there is none."""
    try:
        major, minor, *_ = version(package).split(".")
    except PackageNotFoundError:
        return None
    return (int(major), int(minor))


def drops_hidden(engine: str, shape: ModelShape) -> bool:
    """Whether `engine` has dropout of hidden values for the shape: of transformers' models GPT-2
    alone does in full.
    """
    return engine != "hf-zero3" or shape.positions == "learned"


def shows_gpu() -> bool:
    """Whether a driver shows this process an NVIDIA GPU, by its device file; torch may still be
    unable to use it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # of these, SLURM sets the last
    return visible not in ("", "-1", "NoDevFiles") and any(Path("/dev").glob("nvidia[0-9]*"))


def require_trainable(plan: Any) -> None:
    """Raise ValueError where no engine here can train it, by what is installed beside it."""
    topology = plan.topology
    fused = plan.run.fused
    rule = "is OLMoE's; engines here norm queries and keys head by head"
    require(not plan.shape.qk_norm_whole, "qk_norm_whole", "yes", rule)
    core = release("megatron-core") or (0, 0)
    needs_te = topology.precision == "fp8" or topology.overlap_tp or fused == "te"
    rule = "is not installed here; precision fp8, overlap_tp and run.fused te need it"
    te = "transformer-engine"
    require(not needs_te or release(te) is not None, te, "missing", rule)
    rule = f"is not installed here; dispatcher {topology.dispatcher} needs it"
    has_single = topology.dispatcher not in SINGLE or find_spec("deep_ep") is not None
    require(has_single, "deep_ep", "missing", rule)
    for package, *limits in shipped_json("releases")["beside_megatron"]:
        since, before, first, end = map(tuple, limits)
        installed = release(package)
        if installed and since <= core < before and (needs_te or package != te):
            rule = f"megatron-core {_dots(core)} goes with {_dots(first)} to below {_dots(end)}"
            require(first <= installed < end, package, _dots(installed), rule)
    # transformer/moe/paged_stash.py of 0.18 imports it, and no requirement names it
    has_triton = core < (0, 18) or find_spec("triton") is not None
    require(has_triton, "triton", "missing", f"megatron-core {_dots(core)} imports it")


def _dots(release: tuple[int, ...]) -> str:
    return f"{release[0]}.{release[1]}"


def unsupported_reason(engine: str, shape: ModelShape, topology: Topology) -> str | None:
    """Why `engine` cannot train `shape` on `topology`, as `field=value: the rule`; None where it
    can.
    """
    return first_broken(engine_rules(engine, shape, topology), topology, shape)


def engine_rules(engine: str, shape: ModelShape, topology: Any) -> Rules:
    """The rules of `engine` that a topology breaks; batch sizes never matter."""
    for holds, field, rule in _rules(engine, shape, topology):
        yield holds, field, f"engine {engine} {rule}"


def _rules(engine: str, shape: ModelShape, t: Any) -> Rules:
    """The rules without the name of the engine.

    DeepSpeed 0.19.8 without ZeRO trains wrongly: in half precision the loss was 2e-2 off after 20
    iterations, and each pipeline stage is clipped by its own norm (1.3e-2 off). deepspeed-3d: fp32
    sums outside BF16_Optimizer keep the gradients of a tied embedding from meeting (1.6e-2 off,
    without a word). It hangs where stages differ in their number of optimizer groups: the embedding
    alone has nothing that does not decay. hf-zero3: a model of transformers is one whole, cut by
    ZeRO alone.
    """
    if engine == "hf-zero3":
        for holds, field, rule in nearest_family(shape).rules(shape):
            yield holds, field, f"trains models of transformers: {rule}"
    yield t.precision != "fp4", "precision", "has no 4-bit products"
    by_layers = t.recompute != "operators"
    yield by_layers, "recompute", "recomputes whole layers, or attention's core"
    is_shared = (t.tp == 1) | t.sequence_parallel | (t.offload_checkpoints == 0)
    rule = "needs sequence_parallel, by which tensor-parallel ranks share the inputs of layers"
    yield is_shared, "offload_checkpoints", rule
    if engine == "megatron":
        yield from _megatron_rules(shape, t)
        return
    yield t.shards == 0, "shards", "shares states out among all replicas"
    yield not shape.experts, "experts", "has none"
    yield t.cp == 1, "cp", "shares no sequence"
    yield t.precision != "fp8", "precision", "has no Transformer Engine"
    yield t.overlap_tp == 0, "overlap_tp", "has no Transformer Engine"
    if engine == "deepspeed-3d":
        is_full = (t.partition == "uniform") | (shape.num_layers + 2 >= 2 * t.pp)
        sums = (t.precision == "bf16") & (t.offload == "none")
        sums = sums | (t.precision == "fp32") | (t.pp == 1) | (not t.fp32_gradients)
        yield t.zero == 1, "zero", "has ZeRO stage 1"
        yield is_full, "pp", "needs a transformer layer on every stage"
        yield t.interleaving == 1, "interleaving", "has no interleaved schedule"
        yield sums, "fp32_gradients", "has fp32 sums in bf16 without offload alone"
        recomputes: Sequence[str] = ("none", "full", "block")
    else:
        yield t.tp == 1 or engine != "hf-zero3", "tp", "has no tensor parallelism"
        yield t.pp == 1, "pp", "has no pipeline"
        yield t.partition == "uniform", "partition", "has no pipeline"
        yield t.zero > 0, "zero", "needs ZeRO stage 1 or more"
        recomputes = RECOMPUTE
    if engine == "hf-zero3":
        kernel = shape.positions != "alibi" or t.attention == "scores"
        rule = "writes the scores of ALiBi, as transformers' BLOOM does"
        yield kernel, "attention", rule
        recomputes = ("none", "full")
    rule = f"has {' or '.join(recomputes)}"
    yield np.isin(t.recompute, recomputes), "recompute", rule
    even = "cuts its stages evenly, or by type"
    yield (t.first_stage_layers == 0) & (t.last_stage_layers == 0), "pp", even
    early = (has_bf16_optimizer(t) == 0) & (engine != "deepspeed-3d")
    rule = "sums them after the last microbatch"
    yield early | (t.overlap_grad_reduce == 0), "overlap_grad_reduce", rule
    rule = "gathers them after the step, in ZeRO-3 as it sums"
    yield t.overlap_param_gather == 0, "overlap_param_gather", rule


def _megatron_rules(shape: ModelShape, t: Any) -> Rules:
    tokens = shape.seq_length // t.cp // np.where(t.sequence_parallel, t.tp, 1)
    rule = "multiplies fp8 matrices whose sides, tokens and widths of a rank, are multiples of 16"
    is_aligned = tokens % 16 == 0
    for width in (shape.hidden_size, shape.ffn, shape.query_channels, shape.qkv_channels):
        is_aligned = is_aligned & (width // t.tp % 16 == 0)
    yield (t.precision != "fp8") | is_aligned, "precision", rule
    if shape.experts:
        # megatron-core 0.16.1 to 0.18.2 sums over the wrong group elsewhere, without a word
        is_whole = (t.ep > 1) | (t.etp == t.tp)
        yield is_whole, "etp", "trains experts with ep above 1, or etp equal to tp"
        yield shape.activation == "swiglu", "activation", "has experts with swiglu alone"
        yield shape.biases != "all", "biases", "has experts without biases"
        # softmax over one is 1: the router would have no gradient
        has_gradient = shape.top_k > 1 or shape.router_pre_softmax
        yield has_gradient, "top_k", "trains a choice of one with router_pre_softmax alone"
        yield t.overlap_tp == 0, "overlap_tp", "has no Transformer Engine for experts"
        yield t.precision != "fp8", "precision", "has no fp8 experts"
        is_whole = t.tp * t.shards % (t.ep * t.etp) == 0
        yield is_whole, "shards", "needs tp x shards to be a multiple of ep x etp"
    yield t.zero <= 1, "zero", "has ZeRO stage 0 and 1 (its distributed optimizer)"
    yield t.offload == "none", "offload", "does not offload"
