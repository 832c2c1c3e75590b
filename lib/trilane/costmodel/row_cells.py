"""A row of measurements: its cells, in the documents' words, as a Configuration; and a configuration as cells."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trilane.config.cluster import Cluster, card_words
from trilane.config.model import GATED, ModelShape, padded_vocab_size
from trilane.config.parallelism import CHOICES, Topology
from trilane.costmodel.calibration import Configuration
from trilane.utils.validation import require, require_known, shipped_json


def cells_of(name: str, case: Configuration, seconds: float, memory_bytes: float) -> dict[str, object]:
    """A measured run as the cells of such a CSV, from which read_rows makes the same configuration again."""
    s, t = case.shape, case.topology
    skipped = ("fp32_gradients", "cp", "first_stage_layers", "last_stage_layers")
    fields = {name: value for name, value in vars(t).items() if name not in skipped and "overlap" not in name}
    return {
        **{"row_id": name, "cluster": case.cluster.name, "gpu": case.cluster.gpu.name, "gpus": t.gpus},
        **{"layers": s.num_layers, "hidden": s.hidden_size, "heads": s.num_attention_heads, "seq": s.seq_length},
        **{"padded_vocab": s.vocab_size, **fields, "bf16acc": t.fp32_gradients},
        **{"engine": case.engine, "date": case.day, "sec_per_it": seconds},
        "mem_gb": memory_bytes / 2**30 if memory_bytes == memory_bytes else "",
    }


def stack_of(engine: str, attention: str) -> str:
    """The stack that an engine (or set of rows) belongs to, or the engine's own name where none does."""
    known = shipped_json("stacks")["stacks"]
    stack = next((stack for stack, facts in known.items() if engine in facts["engines"]), engine)
    return known.get(stack, {}).get("later", stack) if attention == "fused" else stack


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
    # '250k' in the chronicles' tables means 250,880: the printed TFLOPs of two rows fit no other number
    vocab = {250_000: 250_880}.get(tokens := integer(cells, "vocab", 50_257), padded_vocab_size(tokens, tp))
    # of some rows the layers are not printed, but inferred from the TFLOPs
    layers = "layers_inferred" if cells.get("layers_inferred") and not cells.get("layers") else "layers"
    return ModelShape(
        num_layers=integer(cells, layers),
        hidden_size=integer(cells, "hidden"),
        num_attention_heads=integer(cells, "heads"),
        seq_length=integer(cells, "seq"),
        vocab_size=integer(cells, "padded_vocab", 0) or vocab,
        tied_embeddings=not flag(cells, "untied"),
        num_key_value_heads=integer(cells, "kv_heads", 0) or None,
        ffn_hidden_size=integer(cells, "ffn", 0) or None,
        **_architecture(cells),
    )


def _architecture(cells: Mapping[str, str]) -> dict[str, Any]:
    """Activation, norm, positions and biases: their columns, then those of the model's family, then GPT-2's."""
    # Llama: Touvron et al. 2023, arXiv:2302.13971, section 2.2; Nemotron-4: Parmar et al. 2024, arXiv:2402.16819,
    # section 2 (rotary positions, squared ReLU, no biases, untied; its norm is LayerNorm)
    names = ("activation", "normalization", "positions", "biases")
    family = ("swiglu", "rmsnorm", "rotary", "none") if flag(cells, "gated") else ("", "", "", "")
    if "nemotron" in cells.get("model", "").lower():
        family = ("squared-relu", "layernorm", "rotary", "none")
    words = {name: cells.get(name) or word for name, word in zip(names, family, strict=True)}
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
    """A cell that is one of some words, or what the documents write for them."""
    synonyms = {"yes": "full", "no": "none", "none?": "none", "block": "full", "uniform": "full"}
    synonyms |= {"cpu:optimizer": "optimizer", "cpu:optimizer+params": "full", "flash": "fused"}
    synonyms |= dict.fromkeys(("flash2", "flash3"), "fused")
    value = cells.get(name) or usual
    value = synonyms.get(value, value)
    require_known(name, value, known)
    return value


def _attention(cells: Mapping[str, str], cluster: Cluster) -> str:
    """Its column; else stacks use flash attention since 2023, and on every H100 or later (arXiv:2205.14135)."""
    modern = cluster.gpu.compute_capability[0] >= 9 or cells.get("date", "") >= "2023"
    usual = "fused" if modern or "flash" in cells.get("notes", "").lower() else "scores"
    return _word(cells, "attention", usual, CHOICES["attention"])


def flag(cells: Mapping[str, str], name: str) -> bool:
    """A cell that is 1 or 0 (or yes, no, true, false); an empty one is 0."""
    word = cells.get(name, "").lower()
    is_true = word in ("1", "1.0", "yes", "true")
    require(is_true or word in ("", "0", "0.0", "no", "false"), name, word, "must be 1 or 0")
    return is_true


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
