"""Measured rows: a CSV with the columns of data/measured.csv as configurations with their measurements."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import OFFLOADS, PARTITIONS, RECOMPUTE, Topology
from trilane.costmodel.calibration import Configuration
from trilane.utils.validation import DATA, require, require_file, require_known

NEEDED = ("row_id", "layers", "hidden", "heads", "seq", "tp", "pp", "dp", "mbs", "gbs")

# '250k' in the chronicles' tables means 250,880: the printed TFLOPs of two rows fit no other number (docs/planner.md)
VOCABULARY = {250_000: 250_880}

# Software stacks, each with one set of constants, and the engines (or sets of rows) that belong to them.
STACKS = {
    "megatron-deepspeed": ("megatron-deepspeed", "megatron-deepspeed-bf16", "A100", "V100-1B3"),
    "megatron-lm": ("megatron-lm", "megatron-ds-3d", "V100-GPT2"),
    "deepspeed-zero": ("megatron-ds-zero", "hf-ds-zero3-offload", "V100-ZeRO3"),
}

# Training stacks use flash attention since 2023, and on every H100 or later: Dao et al. 2022, arXiv:2205.14135. Earlier
# rows without a note store their scores.
FLASH_FROM = "2023"
# Words of the documents for those of a Topology.
OTHER_WORDS = {"recompute": {"yes": "full", "no": "none"}}
OTHER_WORDS |= {"offload": {"cpu:optimizer": "optimizer", "cpu:optimizer+params": "full"}}


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


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that could not be read, and why."""

    row_id: str
    reason: str


def read_rows(path: Path | str, cluster: str | None = None) -> tuple[list[MeasuredRow], list[Skipped]]:
    """The rows of a CSV, and those skipped with a reason; `cluster` replaces the column of that name.

    Raises ValueError for a file that is missing, no CSV, or lacks columns.
    """
    path = Path(path)
    require_file("rows", path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            cells = [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"rows={path}: is not a CSV file ({error})") from None
    missing = [name for name in NEEDED if name not in columns]
    require(not missing, "rows", path, f"has no column {', '.join(missing)}; needed: {', '.join(NEEDED)}")
    known = hardware.cluster(cluster) if cluster else None
    rows: list[MeasuredRow] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(cells, 2):
        name = row["row_id"] or f"line {number}"
        try:
            rows.append(_row(row, name, known))
        except ValueError as error:
            skipped.append(Skipped(row_id=name, reason=str(error)))
    return rows, skipped


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


def _row(cells: Mapping[str, str], name: str, cluster: Cluster | None) -> MeasuredRow:
    machine = cluster or _cluster(cells)
    topology = _topology(cells, machine)
    shape = _shape(cells, topology.tp)
    rule = f"must divide num_attention_heads={shape.num_attention_heads}"
    require(shape.num_attention_heads % topology.tp == 0, "tp", topology.tp, rule)
    seconds, memory = _number(cells, "sec_per_it"), _number(cells, "mem_gb")
    engine = cells.get("engine") or cells.get("set") or ""
    own = engine if engine in ENGINES else ""  # one of this project's engines, which prediction knows
    return MeasuredRow(
        row_id=name,
        case=Configuration(shape=shape, topology=topology, cluster=machine, day=cells.get("date", ""), engine=own),
        stack=next((stack for stack, names in STACKS.items() if engine in names), engine),
        table=cells.get("table_id", ""),
        seconds=seconds,
        memory_bytes=memory * 2**30,
        ran_out=cells.get("oom", "") in ("1", "1.0", "True", "true"),
        excluded=bool(cells.get("exclude")),
        duplicate_of=cells.get("duplicate_of", ""),
    )


def _cluster(cells: Mapping[str, str]) -> Cluster:
    known = {name: hardware.cluster(name) for name in hardware.catalogue()}
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
    )


def _topology(cells: Mapping[str, str], cluster: Cluster) -> Topology:
    # Megatron clamped pp silently; this column has what most likely ran
    effective = {k: int(v) for k, v in re.findall(r"(tp|pp)=(\d+)", cells.get("tp_pp_effective", ""))}
    tp, pp = effective.get("tp") or _integer(cells, "tp"), effective.get("pp") or _integer(cells, "pp")
    dp, gpus = _integer(cells, "dp"), _integer(cells, "gpus", 0)
    require(gpus in (0, tp * pp * dp), "gpus", gpus, f"unlike tp x pp x dp = {tp} x {pp} x {dp} = {tp * pp * dp}")
    precision = cells.get("precision") or ("bf16" if cluster.gpu.bf16_flops_per_s else "fp16")
    zero = _integer(cells, "zero" if cells.get("zero") else "zero_stage", 0)
    attention = _attention(cells, cluster)
    # with flash attention a large model usually fits without recomputation; without it, never
    usual = cells.get("activation_checkpointing") or ("none" if attention == "fused" else "full")
    embedding = "embed" in (cells.get("partition") or cells.get("pp_partition") or "")
    accumulates = _flag(cells, "bf16acc") or cells.get("engine") == "megatron-deepspeed-bf16"
    return Topology(
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=_integer(cells, "mbs"),
        gbs=_integer(cells, "gbs"),
        # the BF16 optimizer with fp32 accumulation shards its states over dp, though not named ZeRO
        zero=max(zero, int(accumulates)),
        recompute=_word(cells, "recompute", usual, RECOMPUTE),
        interleaving=_integer(cells, "interleaving", 1),
        partition=PARTITIONS[int(embedding)],
        sequence_parallel=tp > 1 and _flag(cells, "sequence_parallel"),
        offload=_word(cells, "offload", "none", OFFLOADS),
        precision=precision,
        fp32_gradients=accumulates,
        attention=attention,
        buckets=cells.get("buckets") or "library",  # the documents leave them to DeepSpeed
        adam=cells.get("adam") or "fused",
    )


def _word(cells: Mapping[str, str], name: str, usual: str, known: Sequence[str]) -> str:
    value = cells.get(name) or usual
    value = OTHER_WORDS[name].get(value, value)
    require_known(name, value, known)
    return value


def _attention(cells: Mapping[str, str], cluster: Cluster) -> str:
    if cells.get("attention"):
        return "scores" if cells["attention"] == "scores" else "fused"
    modern = cluster.gpu.compute_capability[0] >= 9 or cells.get("date", "") >= FLASH_FROM
    return "fused" if modern or "flash" in cells.get("notes", "").lower() else "scores"


def _flag(cells: Mapping[str, str], name: str) -> bool:
    return cells.get(name, "").lower() in ("1", "1.0", "true", "yes")


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
