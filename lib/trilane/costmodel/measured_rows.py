"""Measured rows: a CSV whose columns are the fields of shape and topology, as configurations with measurements."""

import csv
import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.config.engines import ENGINES, default_topology
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Configuration
from trilane.utils.validation import DATA, require, require_file, require_known, require_positive, shipped_json
from trilane.workspace.study import load_cluster

NEEDED = ("row_id", "tp", "pp", "dp", "mbs", "gbs", "layers", "hidden", "heads", "seq", "vocab_size")

# Files of rows in data/ that were cleaned, each of its own sites and time.
FILES = ("scored", "dlperf_v100", "dgxc_nemotron_h100", "lucie_jz_a100_2024")


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

    A cell that is empty, or has no column, leaves the choice to default_topology(). Raises ValueError for a file that
    is missing, no CSV, or lacks columns.
    """
    columns, cells = _read(path)
    for old, successor in shipped_json("row_columns")["gone"].items():
        require(old not in columns, "column", old, f"is now {successor}")
    missing = [name for name in NEEDED if name not in columns]
    require(not missing, "rows", path, f"has no column {', '.join(missing)}; needed: {', '.join(NEEDED)}")
    known = {name: hardware.cluster(name) for name in hardware.catalogue()}
    machine = load_cluster(cluster) if cluster else None
    rows: list[MeasuredRow] = []
    skipped: list[Skipped] = []
    for line, row in enumerate(cells, 2):
        name = row["row_id"] or f"line {line}"
        try:
            rows.append(_row(row, name, machine or _cluster_of(row, known), Path(path).stem))
        except ValueError as error:
            skipped.append(Skipped(row_id=name, reason=str(error)))
    return rows, skipped


def ignored_words(path: Path | str) -> list[str]:
    """What read_rows leaves out of account in a CSV, a line each: columns that nothing reads, and unknown stacks."""
    columns, cells = _read(path)
    table = shipped_json("row_columns")
    choices = [table["names"].get(f.name, f.name) for kind in (ModelShape, Topology) for f in fields(kind)]
    read, lines = [*choices, *table["read"]], []
    for name in columns:
        if name and name not in read + table["describe"]:
            near = difflib.get_close_matches(name, read, 1)
            lines.append(f"column={name}: is not known and not read" + (f"; did you mean {near[0]}?" if near else ""))
    names = {name for facts in shipped_json("stacks")["stacks"].values() for name in facts["engines"]}
    for engine in dict.fromkeys(row.get("engine", "") for row in cells):
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
    names = shipped_json("row_columns")["names"]
    return {
        **{"row_id": name, "cluster": case.cluster.name, "gpu": case.cluster.gpu.name, "gpus": case.topology.gpus},
        **{names.get(field, field): value for field, value in {**vars(case.shape), **vars(case.topology)}.items()},
        **{"engine": case.engine, "date": case.day, "sec_per_it": seconds},
        "mem_gb": "" if math.isnan(memory_bytes) else memory_bytes / 2**30,
    }


def stack_of(engine: str, attention: str) -> str:
    """The stack that an engine (or set of rows) belongs to, or the engine's own name where none does."""
    known = shipped_json("stacks")["stacks"]
    stack = next((stack for stack, facts in known.items() if engine in facts["engines"]), engine)
    return known.get(stack, {}).get("later", stack) if attention == "fused" else stack


def _cluster_of(cells: Mapping[str, str], known: Mapping[str, Cluster]) -> Cluster:
    """The cluster of a row by its name; ValueError where its card is another one."""
    require_known("cluster", cells.get("cluster", ""), known)
    cluster = known[cells["cluster"]]
    is_its_card = card_words(cells.get("gpu", "")) <= card_words(cluster.gpu.name)
    require(is_its_card, "gpu", cells.get("gpu"), f"{cluster.name} has {cluster.gpu.name}")
    return cluster


def _need(cells: Mapping[str, str], columns: Sequence[str]) -> None:
    for column in columns:
        require(bool(cells[column]), column, "''", "is missing")


def _row(cells: Mapping[str, str], name: str, machine: Cluster, file: str) -> MeasuredRow:
    _need(cells, ("tp", "pp", "dp"))
    chosen, engine = _values(Topology, cells), cells.get("engine", "")
    named = {size: chosen[size] for size in ("tp", "cp", "pp", "dp") if size != "cp" or chosen.get("cp", 1) > 1}
    product, gpus = math.prod(named.values()), _cell("gpus", int, cells.get("gpus") or "0")
    words = f"{' x '.join(named)} = {' x '.join(map(str, named.values()))}"
    require(gpus in (0, product), "gpus", gpus, f"unlike {words} = {product}")
    _need(cells, NEEDED[1:])
    require(cells.get("ep", "") in ("", "1"), "ep", cells.get("ep"), "mixtures of experts are not predicted")
    if machine.gpu.kind == "cuda" and "precision" in chosen:
        machine.gpu.flops_per_s(chosen["precision"])  # refuses what the card cannot multiply
    shape = ModelShape(**_values(ModelShape, cells))
    topology = default_topology(shape, machine, **chosen)
    rule = f"must divide num_attention_heads={shape.num_attention_heads}"
    require(shape.num_attention_heads % topology.tp == 0, "tp", topology.tp, rule)
    own = engine if engine in ENGINES else ""  # one of this project's engines, which prediction knows
    measured = {name: cells.get(name, "") for name in ("sec_per_it", "mem_gb")}
    for column in (column for column, text in measured.items() if text):
        require_positive(column, _cell(column, float, measured[column]))
    return MeasuredRow(
        row_id=name,
        case=Configuration(shape=shape, topology=topology, cluster=machine, day=cells.get("date", ""), engine=own),
        stack=stack_of(engine, topology.attention),
        table=cells.get("table_id", ""),
        seconds=float(measured["sec_per_it"] or math.nan),
        memory_bytes=float(measured["mem_gb"] or math.nan) * 2**30,
        ran_out=_cell("oom", bool, cells.get("oom") or "0"),
        excluded=bool(cells.get("exclude")),
        duplicate_of=cells.get("duplicate_of", ""),
        file=file,
    )


def _values(kind: type, cells: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a dataclass that a row has cells for."""
    names = shipped_json("row_columns")["names"]
    columns = {f.name: (names.get(f.name, f.name), f.type) for f in fields(kind)}
    return {name: _cell(c, hint, cells[c]) for name, (c, hint) in columns.items() if cells.get(c)}


def _cell(column: str, hint: Any, text: str) -> Any:
    """The value of a cell: a whole number (also as 8.0), a number, 1 or 0 (also True, no, ...), or a word."""
    if hint is str:
        return text
    if hint is bool:
        word = text.lower()
        is_true = word in ("1", "1.0", "yes", "true")
        require(is_true or word in ("0", "0.0", "no", "false"), column, text, "must be 1 or 0")
        return is_true
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_whole = value.is_integer() or hint is float
    require(is_whole and value == value, column, text, f"must be a {'whole ' * (hint is not float)}number")
    return value if hint is float else int(value)
