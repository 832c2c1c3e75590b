"""Measured rows: a CSV with the columns of data/measured.csv as configurations with their measurements."""

import csv
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES
from trilane.costmodel.calibration import Configuration
from trilane.costmodel.row_cells import cluster_of, flag, integer, number, shape_of, stack_of, topology_of
from trilane.utils.validation import DATA, read_json, require, require_file, shipped_json
from trilane.workspace.study import load_cluster

NEEDED = ("row_id", "layers", "hidden", "heads", "seq", "tp", "pp", "dp", "mbs", "gbs")

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

    Raises ValueError for a file that is missing, no CSV, or lacks columns.
    """
    columns, cells = _read(path)
    missing = [name for name in NEEDED if name not in columns]
    require(not missing, "rows", path, f"has no column {', '.join(missing)}; needed: {', '.join(NEEDED)}")
    known = load_cluster(cluster) if cluster else {name: hardware.cluster(name) for name in hardware.catalogue()}
    rows: list[MeasuredRow] = []
    skipped: list[Skipped] = []
    for line, row in enumerate(cells, 2):
        name = row["row_id"] or f"line {line}"
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
    names = {name for facts in shipped_json("stacks")["stacks"].values() for name in facts["engines"]}
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


def _row(cells: Mapping[str, str], name: str, cluster: Cluster | Mapping[str, Cluster]) -> MeasuredRow:
    machine = cluster if isinstance(cluster, Cluster) else cluster_of(cells, cluster)
    topology = topology_of(cells, machine)
    shape = shape_of(cells, topology.tp)
    rule = f"must divide num_attention_heads={shape.num_attention_heads}"
    require(shape.num_attention_heads % topology.tp == 0, "tp", topology.tp, rule)
    seconds, memory = number(cells, "sec_per_it"), number(cells, "mem_gb")
    engine = cells.get("engine") or cells.get("set") or ""
    require(integer(cells, "ep", 1) == 1, "ep", cells.get("ep"), "mixtures of experts are not predicted")
    own = engine if engine in ENGINES else ""  # one of this project's engines, which prediction knows
    return MeasuredRow(
        row_id=name,
        case=Configuration(shape=shape, topology=topology, cluster=machine, day=cells.get("date", ""), engine=own),
        stack=stack_of(engine, topology.attention),
        table=cells.get("table_id", ""),
        seconds=seconds,
        memory_bytes=memory * 2**30,
        ran_out=flag(cells, "oom"),
        excluded=bool(cells.get("exclude")),
        duplicate_of=cells.get("duplicate_of", ""),
    )
