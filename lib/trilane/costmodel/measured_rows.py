"""Measured rows: tables whose columns are the fields of shape and topology, as configurations with
measurements.
"""

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.cluster import Cluster, card_words
from trilane.config.engines import ENGINES, default_topology
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Configuration
from trilane.logs import written_tables
from trilane.utils.tables import one_line
from trilane.utils.validation import (
    DATA,
    read_text,
    require,
    require_known,
    require_positive,
    shipped_json,
    with_nearest,
)
from trilane.workspace.study import load_cluster

NEEDED = ("tp", "pp", "dp", "mbs", "gbs", "layers", "hidden", "heads", "seq", "vocab_size")
# What a column of a hand-written table (data/table_columns.json) is called here, where not the
# same.
RENAMED = {"time": "sec_per_it", "mem": "mem_gb", "vocab": "vocab_size"}
WRITTEN = {name: written for written, name in RENAMED.items()}
Source = Any  # a CSV or Markdown file by its path, or rows as a pandas DataFrame

# Files of rows in data/ that were cleaned, each of its own sites and time.
FILES: tuple[str, ...] = (
    "scored",
    "dlperf_v100",
    "dgxc_nemotron_h100",
    "lucie_jz_a100_2024",
    "fms_fsdp_a100",
)
FILES += ("flagperf_zero3_a800", "tinyllama_a100", "nemo_h100_fp8")


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A row that could not be read, and why."""

    row_id: str
    reason: str


def read_rows(
    source: Source, cluster: Cluster | str | None = None
) -> tuple[list[MeasuredRow], list[Skipped]]:
    """The rows of a CSV, of the tables in a Markdown file or of a DataFrame, and those skipped with
    a reason.

    As each_row().
    """
    found = list(each_row(source, cluster))
    rows = [row for row in found if isinstance(row, MeasuredRow)]
    return rows, [row for row in found if isinstance(row, Skipped)]


def each_row(
    source: Source, cluster: Cluster | str | None = None
) -> Iterator[MeasuredRow | Skipped]:
    """The rows in their order; of a DataFrame also the empty ones, named by its index where no
    row_id names them.

    `cluster` replaces the column of that name. A cell that is empty, or has no column, leaves the
    choice to default_topology(). Raises ValueError for a file that is missing, holds no table, or
    lacks columns.
    """
    known = {name: hardware.cluster(name) for name in hardware.catalogue()}
    machine, name = load_cluster(cluster) if cluster else None, _name(source)
    for columns, body in _read(source):
        missing = [column for column in NEEDED if column not in columns]
        rule = f"has no column {', '.join(missing)}; needed: {', '.join(NEEDED)}"
        require(
            not missing, "rows", name, with_nearest(rule, missing[0], columns) if missing else ""
        )
        for row in body:
            try:
                if not machine:
                    require_known("cluster", row.get("cluster", ""), known)
                yield _row(row, machine or known[row["cluster"]], Path(name).stem)
            except ValueError as error:
                yield Skipped(row_id=row["row_id"], reason=str(error))


def ignored_words(source: Source) -> list[str]:
    """What read_rows leaves out of account, a line each: columns that nothing reads, and unknown
    stacks.
    """
    described, lines, read = shipped_json("row_columns")["describe"], list[str](), columns_read()
    names = {
        name for facts in shipped_json("stacks")["stacks"].values() for name in facts["engines"]
    }
    for columns, body in _read(source):
        for name in columns:
            if name and name not in read + described:
                lines.append(
                    f"column={name}: {with_nearest('is not known and not read', name, read)}"
                )
        for engine in dict.fromkeys(row.get("engine", "") for row in body):
            if engine and not {engine, engine.lower()} & {*names, *ENGINES}:
                lines.append(
                    f"engine={engine}: no stack of that name was measured; what all stacks share is assumed"
                )
    return lines


def columns_read() -> list[str]:
    """The columns that are read: fields of shape and topology, and what was measured."""
    table = shipped_json("row_columns")
    return [
        table["names"].get(f.name, f.name) for kind in (ModelShape, Topology) for f in fields(kind)
    ] + table["read"]


def _name(source: Source) -> str:
    """What errors call the rows; ValueError for what holds none."""
    rule = "must be a DataFrame, or the path of a CSV or Markdown file"
    require(
        isinstance(source, str | Path) or hasattr(source, "itertuples"),
        "rows",
        type(source).__name__,
        rule,
    )
    return str(source) if isinstance(source, str | Path) else "DataFrame"


def _read(source: Source) -> Iterator[tuple[list[str], list[dict[str, str]]]]:
    """Of each table the names of its columns, and its rows: cells by these names, and `row_id`,
    `problem`, `beyond`.

    Columns of hand-written tables count where their unit is known. Raises ValueError for a column
    that is there twice or has another name now, and for a time in an unknown unit.
    """
    is_file, name = isinstance(source, str | Path), _name(source)
    labels = [f"row {label}" for label in source.index] if not is_file else []
    for header, body in _tables_of_file(name) if is_file else [_table_of_frame(source)]:
        columns = _columns([column.strip() for column in header])
        found = list(written_tables.rows(header, body))
        wrong = zip(found, written_tables.wrong(found), strict=True)
        problems = {row.line: next(iter(one.values()), "") for row, one in wrong}
        rows = []
        for line, texts in ((line, texts) for line, texts in body if labels or any(texts)):
            cells = {
                c: _text(c, unit, text) for (c, unit), text in zip(columns, texts, strict=False)
            }
            place = labels[line] if labels else f"line {line}"
            named = {"row_id": cells.get("row_id") or place, "problem": problems.get(line, "")}
            rows.append(cells | named | {"beyond": " ".join(texts[len(columns) :]).strip()})
        yield [column for column, _ in columns], rows


def _tables_of_file(name: str) -> list[tuple[list[str], written_tables.Lines]]:
    text, suffix = read_text(name, "rows", 1 << 26), Path(name).suffix
    suffix = suffix if suffix in written_tables.SUFFIXES else ".csv"
    tables = written_tables.tables(text.splitlines(), suffix)
    found = [
        (header, body)
        for header, body in tables
        if suffix != ".md" or written_tables.measures(header)
    ]
    require(bool(found), "rows", name, "holds no table of measured rows")
    return found


def _table_of_frame(frame: Any) -> tuple[list[str], written_tables.Lines]:
    """The columns of a DataFrame, and its cells as a file has them: "" for NaN and None."""
    cells = frame.astype(object).where(frame.notna(), "").itertuples(index=False, name=None)
    rows = (
        [one_line(str(cell)).removesuffix(" 00:00:00") for cell in row] for row in cells
    )  # of a pandas date
    return [str(column) for column in frame], [*enumerate(rows)]


def _columns(header: list[str]) -> list[tuple[str, str | None]]:
    """The documented name of each column; of one of a hand-written table also the unit, else None."""
    twice = next((name for name in header if name and header.count(name) > 1), "")
    require(not twice, "column", twice, "is there twice")
    found, documented = (
        list[tuple[str, str | None]](),
        {*columns_read(), *shipped_json("row_columns")["describe"]},
    )
    for name in header:
        known, unit = written_tables.column(name)
        known = RENAMED.get(known, known)
        is_new = (
            known in columns_read()
            and known not in header
            and known not in (other for other, _ in found)
        )
        if name in documented or not is_new:
            found.append((name, None))
            continue
        # a number in a unit that is not known would count as one in the column's own
        in_unit = written_tables.number(WRITTEN.get(known, known), "1", unit)
        is_clear = known != "sec_per_it" or (unit != "?" and not re.fullmatch(r"[a-z_]+", name))
        rule = (
            "seconds of an iteration stand in sec_per_it"
            if known == "sec_per_it"
            else "its unit is not known"
        )
        require(is_clear and in_unit == in_unit, "column", name, rule)
        found.append((known, unit))
    return found


def _text(column: str, unit: str | None, text: str) -> str:
    """A cell, of a hand-written table its number in the unit of the column."""
    value = math.nan
    if unit is not None:
        value = written_tables.number(WRITTEN.get(column, column), text, unit)
    return f"{value:.12g}" if value == value else text.strip()


@functools.cache
def every_row() -> tuple[MeasuredRow, ...]:
    """The measured rows of all files that ship and that were cleaned."""
    return tuple(
        row for name in FILES for row in read_rows(shipped_rows().with_name(f"{name}.csv"))[0]
    )


def usable(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """The rows with a time, without duplicates and excluded rows."""
    return [r for r in rows if math.isfinite(r.seconds) and not r.excluded and not r.duplicate_of]


def shipped_rows() -> Path:
    """The CSV of measured rows that ships with trilane."""
    return DATA / "measured.csv"


def cells_of(row: MeasuredRow) -> dict[str, object]:
    """A measured run as the cells of such a CSV, from which read_rows makes the same configuration
    again.
    """
    names, case = shipped_json("row_columns")["names"], row.case
    # of a stack that an engine here has the name of, the row's own engine was another
    engine = case.engine or ("deepspeed" if row.stack in ENGINES else row.stack)
    return {
        **{"row_id": row.row_id, "cluster": case.cluster.name, "gpu": case.cluster.gpu.name},
        "gpus": case.topology.gpus,
        **{
            names.get(field, field): value
            for field, value in {**vars(case.shape), **vars(case.topology)}.items()
        },
        **{"engine": engine, "date": case.day, "sec_per_it": row.seconds},
        "mem_gb": "" if math.isnan(row.memory_bytes) else row.memory_bytes / 2**30,
    }


def stack_of(engine: str, attention: str) -> str:
    """The stack that an engine (or set of rows) belongs to, or the engine's own name where none
    does.
    """
    known = shipped_json("stacks")["stacks"]
    names = {engine, engine.lower()}
    stack = next((stack for stack, facts in known.items() if names & {*facts["engines"]}), engine)
    return known.get(stack, {}).get("later", stack) if attention == "fused" else stack


def _row(cells: Mapping[str, str], machine: Cluster, file: str) -> MeasuredRow:
    rule = "stands beyond the last column; a decimal comma needs quotes, or semicolons between the cells"
    require(not cells["beyond"], "cell", cells["beyond"], rule)
    missing = [column for column in NEEDED if not cells.get(column)]
    require(not missing, ", ".join(missing), "''", "is missing")
    chosen, engine = _values(Topology, cells), cells.get("engine", "")
    named = {
        size: chosen[size]
        for size in ("tp", "cp", "pp", "dp")
        if size != "cp" or chosen.get("cp", 1) > 1
    }
    product, gpus = math.prod(named.values()), _cell("gpus", int, cells.get("gpus") or "0")
    words = f"{' x '.join(named)} = {' x '.join(map(str, named.values()))}"
    require(gpus in (0, product), "gpus", gpus, f"unlike {words} = {product}")
    require(
        cells.get("ep", "") in ("", "1"),
        "ep",
        cells.get("ep"),
        "mixtures of experts are not predicted",
    )
    is_its_card = card_words(cells.get("gpu", "")) <= card_words(machine.gpu.name)
    require(is_its_card, "gpu", cells.get("gpu"), f"{machine.name} has {machine.gpu.name}")
    if machine.gpu.kind == "cuda" and "precision" in chosen:
        machine.gpu.flops_per_s(chosen["precision"])  # refuses what the card cannot multiply
    if stack_of(engine, "") == "fsdp":
        chosen = {"zero": 3, **chosen}  # what PyTorch's fully_shard does where a row does not say
    shape = ModelShape(**_values(ModelShape, cells))
    topology = default_topology(shape, machine, **chosen)
    stack = stack_of(engine, topology.attention)
    topology = _overlapped(topology, stack, chosen)
    rule = f"must divide num_attention_heads={shape.num_attention_heads}"
    require(shape.num_attention_heads % topology.tp == 0, "tp", topology.tp, rule)
    own = (
        engine if engine in ENGINES else ""
    )  # one of this project's engines, which prediction knows
    measured = {name: cells.get(name, "") for name in ("sec_per_it", "mem_gb")}
    for column in (column for column, text in measured.items() if text):
        require_positive(column, _cell(column, float, measured[column]))
    memory, card = float(measured["mem_gb"] or math.nan) * 2**30, machine.gpu.memory_bytes
    rule = f"is more than a card's {card / 2**30:.4g}: GiB on one GPU are needed"
    require(not memory > 2 * card, "mem_gb", measured["mem_gb"], rule)
    return MeasuredRow(
        row_id=cells["row_id"],
        case=Configuration(
            shape=shape, topology=topology, cluster=machine, day=cells.get("date", ""), engine=own
        ),
        stack=stack,
        seconds=float(measured["sec_per_it"] or math.nan),
        memory_bytes=memory,
        table=cells.get("table_id", ""),
        ran_out=_cell("oom", bool, cells.get("oom") or "0"),
        excluded=bool(cells.get("exclude")),
        duplicate_of=cells.get("duplicate_of", ""),
        file=file,
        site=cells.get("cluster", ""),
        problem=cells["problem"],
    )


def _overlapped(topology: Topology, stack: str, chosen: Mapping[str, Any]) -> Topology:
    """The topology with what its software overlaps, where the row does not say and the rest allows
    it.
    """
    for name in shipped_json("stacks")["stacks"].get(stack, {}).get("overlaps", ()):
        with contextlib.suppress(ValueError):
            overlap: dict[str, Any] = {} if name in chosen else {name: True}
            topology = replace(topology, **overlap)
    return topology


def _values(kind: type, cells: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a dataclass that a row has cells for."""
    names = shipped_json("row_columns")["names"]
    columns = {f.name: (names.get(f.name, f.name), f.type) for f in fields(kind)}
    return {name: _cell(c, hint, cells[c]) for name, (c, hint) in columns.items() if cells.get(c)}


def _cell(column: str, hint: Any, text: str) -> Any:
    """The value of a cell: a whole number (also as 8.0), a number, 1 or 0 (also True, no, ...), or
    a word.
    """
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
    require(
        is_whole and value == value,
        column,
        text,
        f"must be a {'whole ' * (hint is not float)}number",
    )
    return value if hint is float else int(value)
