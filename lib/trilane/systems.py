"""Systems: the engines that can train a plan, and what each of them lacks."""

from trilane.shape import ModelShape
from trilane.topology import Topology

ENGINES = ("megatron", "deepspeed-zero", "deepspeed-3d")

Rule = tuple[bool, str, object, str]


def lack(engine: str, shape: ModelShape, topology: Topology) -> str | None:
    """Why `engine` cannot train `shape` on `topology`, as `field=value: the rule`; None where it can."""
    rules = {"megatron": _megatron, "deepspeed-zero": _deepspeed_zero, "deepspeed-3d": _deepspeed_3d}[engine]
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
    return [
        (t.pp == 1, "pp", t.pp, "has no pipeline"),
        (t.partition == "uniform", "partition", t.partition, "has no pipeline"),
        (t.zero > 0 or t.precision == "fp32", "zero", t.zero, f"needs ZeRO stage 1 or more in {t.precision}"),
        *_deepspeed(shape, t),
    ]


def _deepspeed_3d(shape: ModelShape, t: Topology) -> list[Rule]:
    """In DeepSpeed 0.19.8 two things go wrong without a word: stage 0 clips each pipeline stage by its own norm (1.3e-2
    off), and fp32 sums outside its BF16_Optimizer keep the gradients of a tied embedding from meeting (1.6e-2 off). It
    hangs where stages differ in their number of optimizer groups: the embedding alone has nothing that does not decay.
    """
    bare = t.partition != "uniform" and shape.num_layers + 2 < 2 * t.pp
    sums = not t.fp32_gradients or t.pp == 1 or t.precision == "fp32" or (t.precision, t.offload) == ("bf16", "none")
    return [
        (t.zero == 1, "zero", t.zero, "has ZeRO stage 1 alone (stage 0 clips each stage by its own norm)"),
        (not bare, "pp", t.pp, "needs a transformer layer on every stage"),
        (t.interleaving == 1, "interleaving", t.interleaving, "has no interleaved schedule"),
        (sums, "fp32_gradients", True, "has fp32 sums in bf16 without offload alone"),
        (t.recompute != "selective", "recompute", t.recompute, "recomputes whole layers or nothing"),
        *_deepspeed(shape, t),
    ]


def _deepspeed(shape: ModelShape, t: Topology) -> list[Rule]:
    return [
        (not t.sequence_parallel, "sequence_parallel", True, "has no sequence parallelism"),
        (not shape.embedding_layernorm, "embedding_layernorm", True, "has none yet"),
    ]
