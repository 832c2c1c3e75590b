"""Systems: the engines that can train a plan, and what each of them lacks."""

from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology

ENGINES = ("megatron", "deepspeed-zero", "deepspeed-3d", "hf-zero3")


Rule = tuple[bool, str, object, str]


def unsupported_reason(engine: str, shape: ModelShape, topology: Topology) -> str | None:
    """Why `engine` cannot train `shape` on `topology`, as `field=value: the rule`; None where it can."""
    rules = {
        "megatron": _megatron,
        "deepspeed-zero": _deepspeed_zero,
        "deepspeed-3d": _deepspeed_3d,
        "hf-zero3": _hf_zero3,
    }[engine]
    for ok, field, value, rule in rules(shape, topology):
        if not ok:
            return f"{field}={value}: engine {engine} {rule}"
    return None


def _megatron(shape: ModelShape, t: Topology) -> list[Rule]:
    return [
        (t.zero <= 1, "zero", t.zero, "has ZeRO stage 0 and 1 (its distributed optimizer)"),
        (t.offload == "none", "offload", t.offload, "does not offload"),
    ]


def _deepspeed_zero(shape: ModelShape, t: Topology) -> list[Rule]:
    """Stage 0 in half precision trains, but its loss was 2e-2 off after 20 iterations (DeepSpeed 0.19.8)."""
    return [*_no_pipeline(t), *_deepspeed(shape, t)]


def _hf_zero3(shape: ModelShape, t: Topology) -> list[Rule]:
    """transformers' GPT-2 is one whole model: its tensors are cut by ZeRO alone."""
    return [
        (t.tp == 1, "tp", t.tp, "has no tensor parallelism"),
        *_no_pipeline(t),
        (not shape.embedding_layernorm, "embedding_layernorm", True, "has none: GPT-2 of transformers lacks it"),
        (t.recompute != "selective", "recompute", t.recompute, "recomputes whole layers or nothing"),
        *_deepspeed(shape, t),
    ]


def _no_pipeline(t: Topology) -> list[Rule]:
    return [
        (t.pp == 1, "pp", t.pp, "has no pipeline"),
        (t.partition == "uniform", "partition", t.partition, "has no pipeline"),
        (t.zero > 0 or t.precision == "fp32", "zero", t.zero, f"needs ZeRO stage 1 or more in {t.precision}"),
    ]


def _deepspeed_3d(shape: ModelShape, t: Topology) -> list[Rule]:
    """fp32 sums outside DeepSpeed 0.19.8's BF16_Optimizer keep the gradients of a tied embedding from meeting (1.6e-2
    off, without a word). It hangs where stages differ in their number of optimizer groups: the embedding alone has
    nothing that does not decay. Stage 0 clips each stage by its own norm; in fp32 the engine clips in its place.
    """
    bare = t.partition != "uniform" and shape.num_layers + 2 < 2 * t.pp
    sums = not t.fp32_gradients or t.pp == 1 or t.precision == "fp32" or (t.precision, t.offload) == ("bf16", "none")
    return [
        (t.zero == 1 or (t.zero, t.precision) == (0, "fp32"), "zero", t.zero, "has ZeRO stage 1, and 0 in fp32"),
        (not bare, "pp", t.pp, "needs a transformer layer on every stage"),
        (t.interleaving == 1, "interleaving", t.interleaving, "has no interleaved schedule"),
        (sums, "fp32_gradients", True, "has fp32 sums in bf16 without offload alone"),
        (t.recompute != "selective", "recompute", t.recompute, "recomputes whole layers or nothing"),
        *_deepspeed(shape, t),
    ]


def _deepspeed(shape: ModelShape, t: Topology) -> list[Rule]:
    uneven = "first_stage_layers" if t.first_stage_layers else "last_stage_layers"
    return [
        (getattr(t, uneven) == 0, uneven, getattr(t, uneven), "cuts its stages evenly, or by type"),
        (not t.overlap_grad_reduce, "overlap_grad_reduce", True, "decides itself what it overlaps"),
    ]
