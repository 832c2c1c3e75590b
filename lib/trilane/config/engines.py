"""The engines that can train a plan: what each supports, and which choices it makes where a plan
leaves them open.

The defaults of a run have their one place here: precision, attention kernel, gradient sums and ZeRO
stage.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import RECOMPUTE, Topology
from trilane.config.shapes import misfit_of
from trilane.utils.validation import HostError

ENGINES = ("megatron", "deepspeed-zero", "deepspeed-3d", "hf-zero3")
# A package -> what of it goes with megatron-core, from that release on.
BESIDE_MEGATRON = {
    # of 0.16.1 its own extra `dev`; later ones name no bound: each call in their
    # extensions/transformer_engine.py, and ours, has its parameters in 2.9 to 2.20, and
    # Megatron-LM's branches of 0.17 to 0.19 are built with 2.14 to 2.17
    "transformer-engine[pytorch]": {(0, 16): ">=2.9,<2.12", (0, 17): ">=2.9,<2.21"},
    # dist_checkpointing/strategies/nvrx.py of 0.17 and newer fails at its import beside an older
    # one
    "nvidia-resiliency-ext": {(0, 16): ">=0.4", (0, 17): ">=0.6"},
}


def default_precision(cluster: Cluster) -> str:
    """bf16 where the card has it, else fp16, and fp32 on a CPU."""
    if cluster.gpu.kind == "cpu":
        return "fp32"
    return "bf16" if cluster.gpu.bf16_flops_per_s else "fp16"


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

    DeepSpeed's BF16_Optimizer and Megatron-LM's --bf16 do so by default. With fp8 gradients are
    those of bf16.
    """
    return precision in ("bf16", "fp8") and offload == "none"


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
    precision = chosen.get("precision") or default_precision(cluster)
    defaults: dict[str, Any] = {
        "precision": precision,
        "attention": default_attention(shape, cluster, precision, engine),
        "fp32_gradients": default_fp32_gradients(precision, chosen.get("offload", "none")),
        "zero": int(engine != ENGINES[0] or (precision != "fp32" and (chosen.get("dp") or 1) > 1)),
    }
    made = Topology(
        **defaults | {name: value for name, value in chosen.items() if value is not None}
    )
    if chosen.get("overlap_grad_reduce") is not None:
        return made
    # DeepSpeed's overlap_comm, which its pipelines do not have
    overlaps = (
        engine in ("deepspeed-zero", "hf-zero3") and made.dp > 1 and not has_bf16_optimizer(made)
    )
    return replace(made, overlap_grad_reduce=overlaps)


def has_bf16_optimizer(t: Topology) -> bool:
    """Whether DeepSpeed trains it by BF16_Optimizer, which holds fp32 sums and reduces after the
    last microbatch.
    """
    return (t.zero, t.precision, t.fp32_gradients) == (1, "bf16", True)


def label_of(
    shape: ModelShape, cluster: Cluster, topology: Topology, engine: str = ENGINES[0]
) -> str:
    """The topology's label, and every choice beyond the defaults of cluster and engine: no two
    plans share one.

    Of one shape, cluster and batch size, that is; a label names none of these.
    """
    t, precision = topology, default_precision(cluster)
    sums = sums_in_fp32(engine, t)
    named = {
        t.precision: t.precision != precision,
        t.attention: t.attention != default_attention(shape, cluster, t.precision, engine),
        "fp32grads" if sums else f"{t.precision}grads": t.precision != "fp32"
        and sums != (engine == "megatron" or default_fp32_gradients(t.precision, t.offload)),
        engine: engine != ENGINES[0],
    }
    return "-".join([t.label, *(word for word, chosen in named.items() if chosen)])


def untrainable_reason(topology: Topology, fused: str = "auto") -> str | None:
    """Why no engine here can train what may be planned and run by other programs, as `field=value:
    the rule`; or None.

    They train every shape of a dense decoder but those that the engine's own rules name. `fused` is
    run.fused.
    """
    t = topology
    asked = {
        "precision=fp8": t.precision == "fp8",
        "overlap_tp=True": t.overlap_tp,
        "run.fused=te": fused == "te",
    }
    needs = next((field for field, wanted in asked.items() if wanted), "")
    if needs and not installed_version("transformer-engine"):
        return f"{needs}: needs Transformer Engine, which is not installed here"
    return (needs and version_misfit("transformer-engine[pytorch]")) or None


def installed_version(package: str, path: Sequence[str] = ()) -> str:
    """The version of a package that is installed here, or in the folders of `path`; "" where it is
    not.
    """
    return next(
        (found.version for found in distributions(name=package, path=[*path] or sys.path)), ""
    )


def version_misfit(package: str, path: Sequence[str] = ()) -> str:
    """Why the package of BESIDE_MEGATRON does not go with the megatron-core beside it, as
    `package=version: the rule`.

    "" where it does, and where either is not installed.
    """
    name = package.partition("[")[0]
    here, core = installed_version(name, path), installed_version("megatron-core", path)
    if not here or not core:
        return ""
    release, *_ = _releases(here) or [()]
    megatron, *_ = _releases(core) or [()]
    rows = BESIDE_MEGATRON[package]
    bounds = rows[max((since for since in rows if since <= megatron), default=min(rows))]
    low, *high = _releases(bounds)
    if low <= release and not [first for first in high if first <= release]:
        return ""
    return (
        f"{name}={here}: megatron-core {core} goes with {bounds}: pip install '{package}{bounds}'"
    )


def _releases(versions: str) -> list[tuple[int, ...]]:
    """The first two numbers of each version in a text."""
    return [
        (int(first), int(second)) for first, second in re.findall(r"(\d+)\.(\d+)[\w.+]*", versions)
    ]


def drops_hidden(engine: str, shape: ModelShape) -> bool:
    """Whether `engine` has dropout of hidden values for the shape: of transformers' models GPT-2
    alone does in full.
    """
    return engine != "hf-zero3" or shape.positions == "learned"


def shows_gpu() -> bool:
    """Whether a driver shows this process an NVIDIA GPU, by its device file; torch may still be
    unable to use it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in (
        "",
        "-1",
        "NoDevFiles",
    )  # of these, SLURM sets the last
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def has_kernels(card: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether torch, `built` for torch.cuda.get_arch_list(), has kernels for a card of that compute
    capability.

    Machine code (sm_75) runs on its major version from its minor version on, PTX (compute_90) on
    all cards from its version on (CUDA C++ Programming Guide, binary and PTX compatibility); with a
    letter (sm_90a) on its own card alone.
    """
    for kind, _, number in (name.partition("_") for name in built):
        digits = number.rstrip("af")
        version = int(digits[:-1]), int(digits[-1])
        reaches = (
            number.isdigit() and version < card and (kind == "compute" or version[0] == card[0])
        )
        if version == card or reaches:
            return True
    return False


def require_trainable(topology: Topology, fused: str = "auto") -> None:
    """Raise ValueError where no engine here can train it, HostError where this host lacks
    DeepSpeed's compiler.
    """
    reason = untrainable_reason(topology, fused)
    if misfit := version_misfit("nvidia-resiliency-ext"):  # newer wheels are for glibc 2.39 alone
        reason = reason or f"{misfit}, or pip uninstall nvidia-resiliency-ext"
    if reason:
        raise ValueError(reason)
    compiler, *_ = os.environ.get("CXX", "").split() or ["c++"]  # options may follow it
    # DeepSpeed compiles its Adam for the host when it starts; torch's would take 5 to 7 times as
    # long there.
    if topology.offload != "none" and shows_gpu() and not shutil.which(compiler):
        rule = f"with a GPU DeepSpeed compiles its Adam for the host, and there is no C++ compiler {compiler} (CXX)"
        raise HostError(f"offload={topology.offload}: {rule}")


def unsupported_reason(engine: str, shape: ModelShape, topology: Topology) -> str | None:
    """Why `engine` cannot train `shape` on `topology`, as `field=value: the rule`; None where it
    can.
    """
    broken = unsupported_rule(engine, shape, topology)
    return f"{broken[0]}={broken[1]}: {broken[2]}" if broken else None


def unsupported_rule(
    engine: str, shape: ModelShape, topology: Topology
) -> tuple[str, object, str] | None:
    """Field, value and rule of the first thing that `engine` does not support; batch sizes never
    matter.
    """
    rules = _rules(engine, shape, topology)
    return next(
        ((field, value, f"engine {engine} {rule}") for ok, field, value, rule in rules if not ok),
        None,
    )


def _rules(engine: str, shape: ModelShape, t: Topology) -> Iterator[tuple[bool, str, object, str]]:
    """What an engine asks of a topology: whether it holds, the field, its value and the rule.

    DeepSpeed 0.19.8 without ZeRO trains wrongly: in half precision the loss was 2e-2 off after 20
    iterations, and each pipeline stage is clipped by its own norm (1.3e-2 off). deepspeed-3d: fp32
    sums outside BF16_Optimizer keep the gradients of a tied embedding from meeting (1.6e-2 off,
    without a word). It hangs where stages differ in their number of optimizer groups: the embedding
    alone has nothing that does not decay. hf-zero3: a model of transformers is one whole, cut by
    ZeRO alone.
    """
    yield (
        t.recompute != "operators",
        "recompute",
        t.recompute,
        "recomputes whole layers, or attention's core",
    )
    yield not t.offload_checkpoints, "offload_checkpoints", True, "keeps them on the card"
    yield not t.shards, "shards", t.shards, "shares states out among all replicas"
    if engine == "megatron":
        tokens = shape.seq_length // t.cp // (t.tp if t.sequence_parallel else 1)
        widths = (
            shape.hidden_size,
            shape.ffn,
            shape.hidden_size + 2 * shape.kv_heads * shape.head_dim,
        )
        whole = all(size % 16 == 0 for size in (tokens, *(width // t.tp for width in widths)))
        rule = (
            "multiplies fp8 matrices whose sides, tokens and widths of a rank, are multiples of 16"
        )
        yield whole or t.precision != "fp8", "precision", "fp8", rule
        yield t.zero <= 1, "zero", t.zero, "has ZeRO stage 0 and 1 (its distributed optimizer)"
        yield t.offload == "none", "offload", t.offload, "does not offload"
        return
    yield t.cp == 1, "cp", t.cp, "shares no sequence"
    yield t.precision != "fp8", "precision", "fp8", "has no Transformer Engine"
    yield not t.overlap_tp, "overlap_tp", True, "has no Transformer Engine"
    if engine == "deepspeed-3d":
        bare = t.partition != "uniform" and shape.num_layers + 2 < 2 * t.pp
        sums = (
            not t.fp32_gradients
            or t.pp == 1
            or t.precision == "fp32"
            or (t.precision, t.offload) == ("bf16", "none")
        )
        yield t.zero == 1, "zero", t.zero, "has ZeRO stage 1"
        yield not bare, "pp", t.pp, "needs a transformer layer on every stage"
        yield t.interleaving == 1, "interleaving", t.interleaving, "has no interleaved schedule"
        yield sums, "fp32_gradients", True, "has fp32 sums in bf16 without offload alone"
    else:
        yield t.tp == 1 or engine != "hf-zero3", "tp", t.tp, "has no tensor parallelism"
        yield t.pp == 1, "pp", t.pp, "has no pipeline"
        yield t.partition == "uniform", "partition", t.partition, "has no pipeline"
        yield t.zero > 0, "zero", t.zero, "needs ZeRO stage 1 or more"
    if engine == "hf-zero3" and (misfit := misfit_of(shape)):
        yield False, misfit[0], misfit[1], f"trains models of transformers: {misfit[2]}"
    kernel = engine != "hf-zero3" or shape.positions != "alibi" or t.attention == "scores"
    yield (
        kernel,
        "attention",
        t.attention,
        "writes the scores of ALiBi, as transformers' BLOOM does",
    )
    able = {"hf-zero3": ("none", "full"), "deepspeed-3d": ("none", "full", "block")}.get(
        engine, RECOMPUTE
    )
    yield t.recompute in able, "recompute", t.recompute, f"has {' or '.join(able)}"
    for name in ("first_stage_layers", "last_stage_layers"):
        yield getattr(t, name) == 0, name, getattr(t, name), "cuts its stages evenly, or by type"
    sums = not t.overlap_grad_reduce or (engine != "deepspeed-3d" and not has_bf16_optimizer(t))
    yield sums, "overlap_grad_reduce", True, "sums them after the last microbatch"
    yield (
        not t.overlap_param_gather,
        "overlap_param_gather",
        True,
        "gathers them after the step, in ZeRO-3 as it sums",
    )
