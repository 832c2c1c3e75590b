"""A row of measurements: its cells, in the documents' words, as a Configuration; and a configuration as cells."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trilane.config.cluster import Cluster, card_words
from trilane.config.model import GATED, ModelShape, padded_vocab_size
from trilane.config.parallelism import CHOICES, Topology
from trilane.costmodel.calibration import Configuration
from trilane.utils.validation import require, require_known

# '250k' in the chronicles' tables means 250,880: the printed TFLOPs of two rows fit no other number (docs/planner.md)
VOCABULARY = {250_000: 250_880}

# Software stacks, each with its own constants, and the engines (or sets of rows) that belong to them.
STACKS = {
    "megatron-deepspeed": ("megatron-deepspeed", "megatron-deepspeed-bf16", "A100", "V100-1B3", "deepspeed-3d"),
    "megatron-deepspeed-2024": ("megatron-deepspeed-2024",),
    "megatron-lm": ("megatron-lm", "megatron", "megatron-ds-3d", "V100-GPT2"),
    "megatron-core": ("megatron-core", "nemo-megatron-core", "nemo", "megatron-bridge"),
    "deepspeed-zero": ("megatron-ds-zero", "hf-ds-zero3-offload", "hf-zero3", "deepspeed", "V100-ZeRO3"),
    "oneflow": ("oneflow", "libai"),
    "fsdp": ("fsdp", "torch-fsdp", "pytorch-fsdp", "torchtitan", "llm-foundry", "litgpt", "olmo"),
}
# The same project after flash attention, ZeRO-1 in bf16 and asynchronous launches is another stack.
LATER = {"megatron-deepspeed": "megatron-deepspeed-2024", "megatron-lm": "megatron-core"}

# Training stacks use flash attention since 2023, and on every H100 or later: Dao et al. 2022, arXiv:2205.14135. Earlier
# rows without a note store their scores.
FLASH_FROM = "2023"
# Words of the documents for those of a Topology.
SYNONYMS = {"recompute": {"yes": "full", "no": "none", "none?": "none", "block": "full", "uniform": "full"}}
SYNONYMS |= {"offload": {"cpu:optimizer": "optimizer", "cpu:optimizer+params": "full"}}
ATTENTION_WORDS = {"scores": "scores", "fused": "fused", "flash": "fused", "flash2": "fused", "flash3": "fused"}
FLAGS = {"": False, **dict.fromkeys(("0", "0.0", "no", "false"), False)}
FLAGS |= dict.fromkeys(("1", "1.0", "yes", "true"), True)
# Families of models whose architecture the sizes do not give; a column of its own goes first. Llama: Touvron et al.
# 2023, arXiv:2302.13971, section 2.2. Nemotron-4: Parmar et al. 2024, arXiv:2402.16819, section 2 (rotary positions,
# squared ReLU, no biases, untied; its norm is LayerNorm).
LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "positions": "rotary", "biases": "none"}
NEMOTRON = {"activation": "squared-relu", "normalization": "layernorm", "positions": "rotary", "biases": "none"}


def cells_of(name: str, case: Configuration, seconds: float, memory_bytes: float) -> dict[str, object]:
    """A measured run as the cells of such a CSV, from which read_rows makes the same configuration again."""
    s, t = case.shape, case.topology
    return {
        **{"row_id": name, "cluster": case.cluster.name, "gpu": case.cluster.gpu.name, "gpus": t.gpus},
        **{"layers": s.num_layers, "hidden": s.hidden_size, "heads": s.num_attention_heads, "seq": s.seq_length},
        "padded_vocab": s.vocab_size,
        **{field: getattr(t, field) for field in ("dp", "tp", "pp", "mbs", "gbs", "zero", "recompute", "interleaving")},
        **{field: getattr(t, field) for field in ("partition", "sequence_parallel", "offload", "precision")},
        "bf16acc": t.fp32_gradients,
        **{field: getattr(t, field) for field in ("attention", "adam", "buckets")},
        "engine": case.engine,
        "date": case.day,
        "sec_per_it": seconds,
        "mem_gb": memory_bytes / 2**30 if memory_bytes == memory_bytes else "",
    }


def stack_of(engine: str, attention: str) -> str:
    """The stack of STACKS that an engine (or set of rows) belongs to, or the engine's own name where none does."""
    stack = next((stack for stack, names in STACKS.items() if engine in names), engine)
    return LATER.get(stack, stack) if attention == "fused" else stack


def cluster_of(cells: Mapping[str, str], known: Mapping[str, Cluster]) -> Cluster:
    """The cluster of a row by its name; ValueError where its card is another one."""
    card = card_words(cells.get("gpu", ""))
    names = {c.gpu.name for c in known.values()}
    if not any(card <= card_words(name) for name in names):
        require_known("gpu", cells["gpu"], names)
    require_known("cluster", cells.get("cluster", ""), known)
    cluster = known[cells["cluster"]]
    require(card <= card_words(cluster.gpu.name), "gpu", cells.get("gpu"), f"{cluster.name} has {cluster.gpu.name}")
    return cluster


def shape_of(cells: Mapping[str, str], tp: int) -> ModelShape:
    """The model of a row, its vocabulary padded for tp where the row has not the padded one."""
    vocab = integer(cells, "vocab", 50_257)
    # of some rows the layers are not printed, but inferred from the TFLOPs
    layers = "layers_inferred" if cells.get("layers_inferred") and not cells.get("layers") else "layers"
    return ModelShape(
        num_layers=integer(cells, layers),
        hidden_size=integer(cells, "hidden"),
        num_attention_heads=integer(cells, "heads"),
        seq_length=integer(cells, "seq"),
        vocab_size=integer(cells, "padded_vocab", 0) or VOCABULARY.get(vocab) or padded_vocab_size(vocab, tp),
        tied_embeddings=not flag(cells, "untied"),
        num_key_value_heads=integer(cells, "kv_heads", 0) or None,
        ffn_hidden_size=integer(cells, "ffn", 0) or None,
        **_architecture(cells),
    )


def _architecture(cells: Mapping[str, str]) -> dict[str, Any]:
    """Activation, norm, positions and biases: their columns, then those of the model's family, then GPT-2's."""
    family = NEMOTRON if "nemotron" in cells.get("model", "").lower() else LLAMA if flag(cells, "gated") else {}
    words = {name: cells.get(name) or family.get(name, "") for name in LLAMA}
    gated = words["activation"] in GATED
    rule = f"contradicts activation={words['activation']}"
    require(not cells.get("gated") or not words["activation"] or gated == flag(cells, "gated"), "gated", gated, rule)
    return {name: word for name, word in words.items() if word}


def _parallel_sizes(cells: Mapping[str, str]) -> dict[str, Any]:
    """tp, pp, dp and cp of a row; ValueError where their product is not its number of GPUs."""
    # Megatron clamped pp silently; this column has what most likely ran
    effective = {k: int(v) for k, v in re.findall(r"(tp|pp)=(\d+)", cells.get("tp_pp_effective", ""))}
    tp, pp = effective.get("tp") or integer(cells, "tp"), effective.get("pp") or integer(cells, "pp")
    dp, gpus = integer(cells, "dp"), integer(cells, "gpus", 0)
    cp = integer(cells, "cp", 1)
    named = {"tp": tp, "pp": pp, "dp": dp} if cp == 1 else {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    product = f"{' x '.join(named)} = {' x '.join(map(str, named.values()))}"
    require(gpus in (0, tp * cp * pp * dp), "gpus", gpus, f"unlike {product} = {tp * cp * pp * dp}")
    return {"tp": tp, "pp": pp, "dp": dp, "cp": cp}


def topology_of(cells: Mapping[str, str], cluster: Cluster) -> Topology:
    """The topology of a row on a cluster, with what its stack did where the row does not say; ValueError for a word
    that is not known.
    """
    sizes = _parallel_sizes(cells)
    precision = cells.get("precision") or ("bf16" if cluster.gpu.bf16_flops_per_s else "fp16")
    if cluster.gpu.kind == "cuda":
        cluster.gpu.flops_per_s(precision)  # refuses what the card cannot multiply
    attention = _attention(cells, cluster)
    # with flash attention a large model usually fits without recomputation; without it, never
    usual = cells.get("activation_checkpointing") or ("none" if attention == "fused" else "full")
    embedding = "embed" in (cells.get("partition") or cells.get("pp_partition") or "")
    accumulates = flag(cells, "bf16acc") or cells.get("engine") == "megatron-deepspeed-bf16"
    stack = stack_of(cells.get("engine") or cells.get("set") or "", attention)
    later = stack == "megatron-deepspeed-2024"
    # FSDP shards everything unless told otherwise (PyTorch, ShardingStrategy.FULL_SHARD)
    usual_zero = 3 if stack == "fsdp" and sizes["pp"] == 1 else 0
    zero = integer(cells, "zero" if cells.get("zero") else "zero_stage", usual_zero)
    return Topology(
        **sizes,
        mbs=integer(cells, "mbs"),
        gbs=integer(cells, "gbs"),
        # DeepSpeed's BF16 optimizer shards its states over dp, though not named ZeRO
        zero=max(zero, int(accumulates or (later and precision == "bf16"))),
        recompute=_word(cells, "recompute", usual, CHOICES["recompute"]),
        interleaving=integer(cells, "vp" if cells.get("vp") else "interleaving", 1),
        partition=CHOICES["partition"][int(embedding)],
        sequence_parallel=sizes["tp"] > 1 and flag(cells, "sequence_parallel"),
        offload=_word(cells, "offload", "none", CHOICES["offload"]),
        precision=precision,
        fp32_gradients=accumulates,
        attention=attention,
        # the documents leave them to DeepSpeed; other stacks have none of its size
        buckets=cells.get("buckets") or ("layer" if stack in ("megatron-core", "fsdp", "oneflow") else "library"),
        adam=cells.get("adam") or "fused",
    )


def _word(cells: Mapping[str, str], name: str, usual: str, known: Sequence[str]) -> str:
    value = cells.get(name) or usual
    value = SYNONYMS[name].get(value, value)
    require_known(name, value, known)
    return value


def _attention(cells: Mapping[str, str], cluster: Cluster) -> str:
    if word := cells.get("attention"):
        require_known("attention", word, ATTENTION_WORDS)
        return ATTENTION_WORDS[word]
    modern = cluster.gpu.compute_capability[0] >= 9 or cells.get("date", "") >= FLASH_FROM
    return "fused" if modern or "flash" in cells.get("notes", "").lower() else "scores"


def flag(cells: Mapping[str, str], name: str) -> bool:
    """A cell that is 1 or 0 (or yes, no, true, false); an empty one is 0."""
    word = cells.get(name, "").lower()
    require(word in FLAGS, name, word, "must be 1 or 0")
    return FLAGS[word]


def number(cells: Mapping[str, str], name: str) -> float:
    """A cell that is a number above zero; NaN where it is empty."""
    text = cells.get(name, "")
    try:
        value = float(text or math.nan)
    except ValueError:
        raise ValueError(f"{name}={text}: must be a number") from None
    require(not text or 0 < value < math.inf, name, text, "must be a number above zero")
    return value


def integer(cells: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """A cell that is a whole number; `otherwise` where it is empty, ValueError where there is no such."""
    text = cells.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    require(bool(text), name, "''", "is missing")
    try:
        value = float(text)
        whole = value == int(value)
    except (ValueError, OverflowError):  # also of nan and inf
        whole = False
    require(whole, name, text, "must be a whole number")
    return int(value)
