"""Measured rows: tables whose columns are the fields of shape and topology, as configurations with
measurements.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.config.engines import ENGINES, default_topology
from trilane.config.model import ModelShape
from trilane.config.parallelism import PARTITION, Topology
from trilane.costmodel.calibration import Configuration
from trilane.logs import written_tables
from trilane.utils.frozen import frozen
from trilane.utils.tables import one_line
from trilane.utils.validation import (
    DATA,
    read_text,
    require,
    require_known,
    shipped_json,
    with_nearest,
)
from trilane.workspace.study import load_cluster

NEEDED = ["tp", "pp", "dp", "mbs", "gbs", "num_layers", "hidden_size", "num_attention_heads"]
NEEDED += ["seq_length", "vocab_size"]
Source = Any  # a CSV or Markdown file by its path, or rows as a pandas DataFrame
MOST_BYTES = 1 << 26  # of a file of rows

# files of rows in data/ that were cleaned, each of its own sites and time
FILES = shipped_json("row_columns")["files"]


@frozen
class MeasuredRow:
    """A measured run: configuration, seconds per iteration and bytes of the fullest GPU (NaN if
    unknown), and OOM.

    `site` is the cluster that the row names, `problem` what its numbers contradict.
    """

    row_id: str
    case: Configuration
    stack: str
    seconds: float
    memory_bytes: float
    table: str = ""
    ran_out: bool = False
    excluded: bool = False
    duplicate_of: str = ""
    file: str = ""
    site: str = ""
    problem: str = ""


@frozen
class Skipped:
    """A row that could not be read, and why."""

    row_id: str
    reason: str


def read_rows(
    sources: Sequence[Source], cluster: Cluster | str | None = None
) -> tuple[list[MeasuredRow], list[Skipped], list[str]]:
    """The rows of each_row() of all sources, those skipped with a reason, and ignored_columns()."""
    rows = []
    skipped = []
    ignored = []
    for source in sources:
        for row in each_row(source, cluster):
            if isinstance(row, Skipped):
                skipped.append(row)
            else:
                rows.append(row)
        ignored += ignored_columns(source)
    return rows, skipped, ignored


def each_row(
    source: Source, cluster: Cluster | str | None = None
) -> Iterator[MeasuredRow | Skipped]:
    """The rows of a CSV, of the tables in a Markdown file or of a DataFrame, in their order.

    `cluster` replaces the column of that name. A cell that is empty, or has no column, leaves the
    choice to default_topology(). Raises ValueError for a file that is missing.
    """
    clusters = {name: hardware.cluster(name) for name in hardware.catalogue()}
    machine = load_cluster(cluster) if cluster else None
    name = str(source) if isinstance(source, str | Path) else "DataFrame"
    for columns, table in _tables(source):
        for column in filter(None, columns):
            require(columns.count(column) == 1, "column", column, "is there twice")
        for place, texts in table:
            cells = {"row_id": place}
            for column, text in zip(columns, texts, strict=False):
                if text.strip():
                    cells[column] = text.strip()
            beyond = "".join(texts[len(columns) :])
            rule = "stands beyond the last column; a decimal comma needs quotes"
            try:
                require(not beyond, "cell", beyond, rule)
                if machine is None:
                    require_known("cluster", cells.get("cluster", ""), clusters)
                yield _row(cells, machine or clusters[cells["cluster"]], Path(name).stem)
            except ValueError as error:
                yield Skipped(row_id=cells["row_id"], reason=str(error))


def ignored_columns(source: Source) -> list[str]:
    """The columns that nothing reads, a line each."""
    words = shipped_json("row_columns")
    known = {"", *_kinds(), *words["read"], *words["describe"]}
    unknown = dict[str, None]()  # each once
    for columns, _ in _tables(source):
        unknown |= dict.fromkeys(column for column in columns if column not in known)
    lines = []
    for column in unknown:
        rule = with_nearest("is not known and not read", column, known)
        if column.lower() in words["foreign"]:
            rule = f"is not read; call it {words['foreign'][column.lower()]}"
        lines.append(f"column={column}: {rule}")
    return lines


def _tables(source: Source) -> list[tuple[list[str], list[tuple[str, list[str]]]]]:
    """Of each table the names of its columns, and its rows: what names a row, its cells."""
    if isinstance(source, str | Path):
        lines = read_text(Path(source), "rows", MOST_BYTES).splitlines()
        suffix = ".md" if Path(source).suffix == ".md" else ".csv"
        tables = []
        for header, body in written_tables.tables(lines, suffix):
            rows = [(f"line {line}", texts) for line, texts in body if any(texts)]
            if suffix == ".csv" or "sec_per_it" in header:  # a document has other tables
                tables.append((_names(header), rows))
        return tables
    rows = []
    cells = source.astype(object).where(source.notna(), "")
    for name, *row in cells.itertuples(name=None):
        # pandas writes a date with its midnight
        texts = [one_line(str(cell)).removesuffix(" 00:00:00") for cell in row]
        rows.append((f"row {name}", texts))
    return [(_names(source), rows)]


def _names(header: Iterable[Any]) -> list[str]:
    """The columns by the names of fields: some have a short one in tables."""
    names = shipped_json("row_columns")["names"]
    columns = [str(name).strip() for name in header]
    return [names.get(column, column) for column in columns]


@functools.cache
def every_row() -> tuple[MeasuredRow, ...]:
    """The measured rows of all files that ship and that were cleaned."""
    rows, _, _ = read_rows([DATA / f"{name}.csv" for name in FILES])
    return tuple(rows)


def usable(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """The rows with a time, without duplicates and excluded rows."""
    return [r for r in rows if math.isfinite(r.seconds) and not r.excluded and not r.duplicate_of]


def stacks() -> dict[str, Any]:
    """What is known of each software stack (data/stacks.json)."""
    return shipped_json("stacks")["stacks"]


def stack_of(engine: str, attention: str) -> str:
    """The stack that an engine (or set of rows) belongs to, or the engine's own name where none
    does.
    """
    for stack, facts in stacks().items():
        if engine.lower() in facts["engines"]:
            if attention == "fused":
                return facts.get("later", stack)
            return stack
    return engine


@functools.cache
def _kinds() -> dict[str, Any]:
    """The type of each column that is no text or a field of ModelShape or Topology."""
    kinds = {"gpus": int, "sec_per_it": float, "mem_gb": float, "oom": bool}
    return kinds | {field.name: field.type for field in (*fields(ModelShape), *fields(Topology))}


def _row(cells: Mapping[str, str], machine: Cluster, file: str) -> MeasuredRow:
    missing = [column for column in NEEDED if not cells.get(column)]
    require(not missing, ", ".join(missing), "''", "is missing")
    values = {column: _cell(column, text) for column, text in cells.items()}
    engine = cells.get("engine", "")
    chosen = _fields(Topology, values)
    product = chosen.get("cp", 1) * chosen["tp"] * chosen["pp"] * chosen["dp"]
    gpus = values.get("gpus", product)
    require(gpus == product, "gpus", gpus, f"unlike tp x cp x pp x dp = {product}")
    words = shipped_json("row_columns")
    for column, rule in words["refused"].items():
        usual, _, reason = rule.partition(": ")
        require(cells.get(column, usual) == usual, column, cells.get(column), reason)
    if "dispatcher" in chosen:
        word = chosen["dispatcher"]
        chosen["dispatcher"] = words["dispatchers"].get(word, word)
    gpu = values.get("gpu", "")
    is_its_card = card_words(gpu) <= card_words(machine.gpu.name)
    require(is_its_card, "gpu", gpu, f"{machine.name} has {machine.gpu.name}")
    if machine.gpu.kind == "cuda" and "precision" in chosen:
        machine.gpu.flops_per_s(chosen["precision"])  # refuses what the card cannot multiply
    if stack_of(engine, "") == "fsdp":
        chosen.setdefault("zero", 3)  # what PyTorch's fully_shard does where a row does not say
    shape = ModelShape(**_fields(ModelShape, values))
    chunks = chosen["pp"] * chosen.get("interleaving", 1)
    if shape.num_layers % chunks and (shape.num_layers + 2) % chunks == 0:
        chosen.setdefault("partition", PARTITION[1])  # how Megatron-LM then cuts stages evenly
    topology = default_topology(shape, machine, **chosen)
    stack = stack_of(engine, topology.attention)
    if stacks().get(stack, {}).get("shards_bf16") and topology.precision == "bf16":
        topology = replace(topology, zero=max(topology.zero, 1))
    for name in stacks().get(stack, {}).get("overlaps", ()):
        if name not in chosen:
            with contextlib.suppress(ValueError):  # what the rest of the topology does not allow
                overlap: dict[str, Any] = {name: True}
                topology = replace(topology, **overlap)
    require(shape.experts > 0 or topology.ep == 1, "ep", topology.ep, "needs experts")
    rule = f"must divide num_attention_heads={shape.num_attention_heads}"
    require(shape.num_attention_heads % topology.tp == 0, "tp", topology.tp, rule)
    case = Configuration(
        shape=shape,
        topology=topology,
        cluster=machine,
        day=cells.get("date", ""),
        engine=engine if engine in ENGINES else "",
    )
    return MeasuredRow(
        row_id=cells["row_id"],
        case=case,
        stack=stack,
        seconds=values.get("sec_per_it", math.nan),
        memory_bytes=values.get("mem_gb", math.nan) * 2**30,
        table=cells.get("table_id", ""),
        ran_out=values.get("oom", False),
        excluded="exclude" in cells,
        duplicate_of=cells.get("duplicate_of", ""),
        file=file,
        site=cells.get("cluster", ""),
    )


def _fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that a row has values for."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _cell(column: str, text: str) -> Any:
    """The value of a cell: a whole number (also as 8.0), a number above zero, 1 or 0 (also True,
    no, ...), or a word.
    """
    kind = _kinds().get(column, str)
    if kind is str:
        return text
    if kind is bool:
        is_true = text.lower() in ("1", "1.0", "yes", "true")
        is_false = text.lower() in ("0", "0.0", "no", "false")
        require(is_true or is_false, column, text, "must be 1 or 0")
        return is_true
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if kind is float:
        require(0 < value < math.inf, column, text, "must be a number above zero")
        return value
    require(value.is_integer(), column, text, "must be a whole number")
    return int(value)
