"""Measured rows: a CSV with the columns of data/measured.csv as configurations with their measurements."""

import csv
import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.config.engines import ENGINES
from trilane.config.model import GATED, ModelShape, padded_vocab_size
from trilane.config.parallelism import OFFLOADS, PARTITIONS, RECOMPUTE, Topology
from trilane.costmodel.calibration import Configuration
from trilane.utils.validation import DATA, read_json, require, require_file, require_known

NEEDED = ("row_id", "layers", "hidden", "heads", "seq", "tp", "pp", "dp", "mbs", "gbs")

# '250k' in the chronicles' tables means 250,880: the printed TFLOPs of two rows fit no other number (docs/planner.md)
VOCABULARY = {250_000: 250_880}

# Files of rows in data/ that were cleaned, each of its own sites and time.
FILES = ("scored", "dlperf_v100", "dgxc_nemotron_h100", "lucie_jz_a100_2024")
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
OTHER_WORDS = {"recompute": {"yes": "full", "no": "none", "none?": "none", "block": "full", "uniform": "full"}}
OTHER_WORDS |= {"offload": {"cpu:optimizer": "optimizer", "cpu:optimizer+params": "full"}}
ATTENTION_WORDS = {"scores": "scores", "fused": "fused", "flash": "fused", "flash2": "fused", "flash3": "fused"}
FLAGS = {"": False, **dict.fromkeys(("0", "0.0", "no", "false"), False)}
FLAGS |= dict.fromkeys(("1", "1.0", "yes", "true"), True)
# Families of models whose architecture the sizes do not give; a column of its own goes first. Llama: Touvron et al.
# 2023, arXiv:2302.13971, section 2.2. Nemotron-4: Parmar et al. 2024, arXiv:2402.16819, section 2 (rotary positions,
# squared ReLU, no biases, untied; its norm is LayerNorm).
LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "positions": "rotary", "biases": "none"}
NEMOTRON = {"activation": "squared-relu", "normalization": "layernorm", "positions": "rotary", "biases": "none"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A measured run: configuration, seconds per iteration and bytes of the fullest GPU (NaN if unknown), and OOM."""

    row_id: str
    case: Configuration
    stack: str
    table: str
    seconds: float
    memory_bytes: float
    ran_out: bool
    excluded: bool
    duplicate_of: str
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that could not be read, and why."""

    row_id: str
    reason: str


def read_rows(path: Path | str, cluster: str | None = None) -> tuple[list[MeasuredRow], list[Skipped]]:
    """The rows of a CSV, and those skipped with a reason; `cluster` replaces the column of that name.

    Raises ValueError for a file that is missing, no CSV, or lacks columns.
    """
    columns, cells = _read(path)
    missing = [name for name in NEEDED if name not in columns]
    require(not missing, "rows", path, f"has no column {', '.join(missing)}; needed: {', '.join(NEEDED)}")
    known = hardware.cluster(cluster) if cluster else {name: hardware.cluster(name) for name in hardware.catalogue()}
    rows: list[MeasuredRow] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(cells, 2):
        name = row["row_id"] or f"line {number}"
        try:
            rows.append(replace(_row(row, name, known), file=Path(path).stem))
        except ValueError as error:
            skipped.append(Skipped(row_id=name, reason=str(error)))
    return rows, skipped


def ignored_words(path: Path | str) -> list[str]:
    """What read_rows leaves out of account in a CSV, a line each: columns that nothing reads, and unknown stacks."""
    columns, cells = _read(path)
    known = read_json(DATA / "row_columns.json", "columns")
    lines = []
    for name in columns:
        if name and name not in known["read"] + known["describe"]:
            near = difflib.get_close_matches(name, known["read"], 1)
            lines.append(f"column={name}: is not known and not read" + (f"; did you mean {near[0]}?" if near else ""))
    names = {name for engines in STACKS.values() for name in engines}
    for engine in dict.fromkeys(row.get("engine") or row.get("set") or "" for row in cells):
        if engine and engine not in names | set(ENGINES):
            lines.append(f"engine={engine}: no stack of that name was measured; what all stacks share is assumed")
    return lines


def _read(path: Path | str) -> tuple[Sequence[str], list[dict[str, str]]]:
    """The names of the columns of a CSV, and its cells, stripped, a row each."""
    path = Path(path)
    require_file("rows", path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return reader.fieldnames or [], [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"rows={path}: is not a CSV file ({error})") from None


@functools.cache
def every_row() -> tuple[MeasuredRow, ...]:
    """The measured rows of all files that ship and that were cleaned."""
    return tuple(row for name in FILES for row in read_rows(shipped_rows().with_name(f"{name}.csv"))[0])


def shipped_rows() -> Path:
    """The CSV of measured rows that ships with trilane."""
    return DATA / "measured.csv"


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


def _row(cells: Mapping[str, str], name: str, cluster: Cluster | Mapping[str, Cluster]) -> MeasuredRow:
    machine = cluster if isinstance(cluster, Cluster) else _cluster(cells, cluster)
    topology = _topology(cells, machine)
    shape = _shape(cells, topology.tp)
    rule = f"must divide num_attention_heads={shape.num_attention_heads}"
    require(shape.num_attention_heads % topology.tp == 0, "tp", topology.tp, rule)
    seconds, memory = _number(cells, "sec_per_it"), _number(cells, "mem_gb")
    engine = cells.get("engine") or cells.get("set") or ""
    require(_integer(cells, "ep", 1) == 1, "ep", cells.get("ep"), "mixtures of experts are not predicted")
    own = engine if engine in ENGINES else ""  # one of this project's engines, which prediction knows
    return MeasuredRow(
        row_id=name,
        case=Configuration(shape=shape, topology=topology, cluster=machine, day=cells.get("date", ""), engine=own),
        stack=stack_of(engine, topology.attention),
        table=cells.get("table_id", ""),
        seconds=seconds,
        memory_bytes=memory * 2**30,
        ran_out=_flag(cells, "oom"),
        excluded=bool(cells.get("exclude")),
        duplicate_of=cells.get("duplicate_of", ""),
    )


def stack_of(engine: str, attention: str) -> str:
    """The stack of STACKS that an engine (or set of rows) belongs to, or the engine's own name where none does."""
    stack = next((stack for stack, names in STACKS.items() if engine in names), engine)
    return LATER.get(stack, stack) if attention == "fused" else stack


def _cluster(cells: Mapping[str, str], known: Mapping[str, Cluster]) -> Cluster:
    card = card_words(cells.get("gpu", ""))
    names = {c.gpu.name for c in known.values()}
    if not any(card <= card_words(name) for name in names):
        require_known("gpu", cells["gpu"], names)
    require_known("cluster", cells.get("cluster", ""), known)
    cluster = known[cells["cluster"]]
    require(card <= card_words(cluster.gpu.name), "gpu", cells.get("gpu"), f"{cluster.name} has {cluster.gpu.name}")
    return cluster


def _shape(cells: Mapping[str, str], tp: int) -> ModelShape:
    vocab = _integer(cells, "vocab", 50_257)
    # of some rows the layers are not printed, but inferred from the TFLOPs
    layers = "layers_inferred" if cells.get("layers_inferred") and not cells.get("layers") else "layers"
    return ModelShape(
        num_layers=_integer(cells, layers),
        hidden_size=_integer(cells, "hidden"),
        num_attention_heads=_integer(cells, "heads"),
        seq_length=_integer(cells, "seq"),
        vocab_size=_integer(cells, "padded_vocab", 0) or VOCABULARY.get(vocab) or padded_vocab_size(vocab, tp),
        tied_embeddings=not _flag(cells, "untied"),
        num_key_value_heads=_integer(cells, "kv_heads", 0) or None,
        ffn_hidden_size=_integer(cells, "ffn", 0) or None,
        **_architecture(cells),
    )


def _architecture(cells: Mapping[str, str]) -> dict[str, Any]:
    """Activation, norm, positions and biases: their columns, then those of the model's family, then GPT-2's."""
    family = NEMOTRON if "nemotron" in cells.get("model", "").lower() else LLAMA if _flag(cells, "gated") else {}
    words = {name: cells.get(name) or family.get(name, "") for name in LLAMA}
    gated = words["activation"] in GATED
    rule = f"contradicts activation={words['activation']}"
    require(not cells.get("gated") or not words["activation"] or gated == _flag(cells, "gated"), "gated", gated, rule)
    return {name: word for name, word in words.items() if word}


def _topology(cells: Mapping[str, str], cluster: Cluster) -> Topology:
    # Megatron clamped pp silently; this column has what most likely ran
    effective = {k: int(v) for k, v in re.findall(r"(tp|pp)=(\d+)", cells.get("tp_pp_effective", ""))}
    tp, pp = effective.get("tp") or _integer(cells, "tp"), effective.get("pp") or _integer(cells, "pp")
    dp, gpus = _integer(cells, "dp"), _integer(cells, "gpus", 0)
    cp = _integer(cells, "cp", 1)
    sizes, product = (
        ("tp x pp x dp", f"{tp} x {pp} x {dp}") if cp == 1 else ("tp x cp x pp x dp", f"{tp} x {cp} x {pp} x {dp}")
    )
    require(gpus in (0, tp * cp * pp * dp), "gpus", gpus, f"unlike {sizes} = {product} = {tp * cp * pp * dp}")
    precision = cells.get("precision") or ("bf16" if cluster.gpu.bf16_flops_per_s else "fp16")
    if cluster.gpu.kind == "cuda":
        cluster.gpu.flops_per_s(precision)  # refuses what the card cannot multiply
    attention = _attention(cells, cluster)
    # with flash attention a large model usually fits without recomputation; without it, never
    usual = cells.get("activation_checkpointing") or ("none" if attention == "fused" else "full")
    embedding = "embed" in (cells.get("partition") or cells.get("pp_partition") or "")
    accumulates = _flag(cells, "bf16acc") or cells.get("engine") == "megatron-deepspeed-bf16"
    stack = stack_of(cells.get("engine") or cells.get("set") or "", attention)
    later = stack == "megatron-deepspeed-2024"
    # FSDP shards everything unless told otherwise (PyTorch, ShardingStrategy.FULL_SHARD)
    zero = _integer(cells, "zero" if cells.get("zero") else "zero_stage", 3 if stack == "fsdp" and pp == 1 else 0)
    return Topology(
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=_integer(cells, "mbs"),
        gbs=_integer(cells, "gbs"),
        # DeepSpeed's BF16 optimizer shards its states over dp, though not named ZeRO
        zero=max(zero, int(accumulates or (later and precision == "bf16"))),
        recompute=_word(cells, "recompute", usual, RECOMPUTE),
        interleaving=_integer(cells, "vp" if cells.get("vp") else "interleaving", 1),
        cp=cp,
        partition=PARTITIONS[int(embedding)],
        sequence_parallel=tp > 1 and _flag(cells, "sequence_parallel"),
        offload=_word(cells, "offload", "none", OFFLOADS),
        precision=precision,
        fp32_gradients=accumulates,
        attention=attention,
        # the documents leave them to DeepSpeed; other stacks have none of its size
        buckets=cells.get("buckets") or ("layer" if stack in ("megatron-core", "fsdp", "oneflow") else "library"),
        adam=cells.get("adam") or "fused",
    )


def _word(cells: Mapping[str, str], name: str, usual: str, known: Sequence[str]) -> str:
    value = cells.get(name) or usual
    value = OTHER_WORDS[name].get(value, value)
    require_known(name, value, known)
    return value


def _attention(cells: Mapping[str, str], cluster: Cluster) -> str:
    if word := cells.get("attention"):
        require_known("attention", word, ATTENTION_WORDS)
        return ATTENTION_WORDS[word]
    modern = cluster.gpu.compute_capability[0] >= 9 or cells.get("date", "") >= FLASH_FROM
    return "fused" if modern or "flash" in cells.get("notes", "").lower() else "scores"


def _flag(cells: Mapping[str, str], name: str) -> bool:
    word = cells.get(name, "").lower()
    require(word in FLAGS, name, word, "must be 1 or 0")
    return FLAGS[word]


def _number(cells: Mapping[str, str], name: str, rule: str = "must be a number") -> float:
    text = cells.get(name, "")
    try:
        value = float(text or math.nan)
    except ValueError:
        raise ValueError(f"{name}={text}: {rule}") from None
    require(not text or 0 < value < math.inf, name, text, f"{rule} above zero")
    return value


def _integer(cells: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
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
