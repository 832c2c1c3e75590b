"""Measured runs as rows that recalibrate the planner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trilane.analysis.collect import files, measure_all
from trilane.analysis.measure import Measurement
from trilane.analysis.run_config import card
from trilane.config.cluster import Cluster
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.measured_rows import MeasuredRow, Skipped, ignored_words, read_rows, stack_of
from trilane.costmodel.recalibration import Recalibration, recalibrated
from trilane.logs.written_tables import SUFFIXES
from trilane.utils.validation import require, with_nearest
from trilane.workspace.study import Study, studies


def fit_source(source: str, cluster: Cluster) -> Recalibration:
    """fit() to a file, folder or glob of rows, logs or run folders, or to the runs of a study."""
    paths = files(source)
    if not paths and not Path(source).exists() and "/" not in source:
        study = Study(source)
        paths = study.run_folders() or sorted(study.folder.glob("measured.csv"))
    rule = "is neither a file, nor a folder with runs or logs, nor a study with runs"
    require(bool(paths), "rows", source, with_nearest(rule, source, studies()))
    tables = [path for path in paths if path.suffix in SUFFIXES]
    gpu = cluster.gpu if cluster.gpu.kind == "cuda" else None
    runs, unread = measure_all([path for path in paths if path not in tables], gpu=gpu)
    rows, skipped, ignored = _rows(runs, tables, cluster)
    skipped += [Skipped(row_id=source, reason=reason) for reason in unread]
    return recalibrated(rows, skipped, ignored, cluster, least=2)


def recalibrate(runs: Sequence[Measurement], cluster: Cluster | None = None) -> Recalibration:
    """fit() to the runs whose shape and topology are known, on `cluster` unless they have a plan;
    without rows where they contradict each other.

        recalibrate(measure_runs(Study.open("demo")).runs).to_frame()
    """
    typed, skipped = [m for m in runs if m.log.dialect == "table"], list[Skipped]()
    try:
        others = [m for m in runs if m.log.dialect != "table" and m.iterations]
        rows, skipped, ignored = _rows(
            others, list(dict.fromkeys(m.log.source for m in typed)), cluster
        )
        return recalibrated(rows, skipped, ignored, cluster, least=1)
    except ValueError as error:
        left_out = (*skipped, Skipped(row_id="all", reason=str(error)))
        return Recalibration(prior=Calibration(), left_out=left_out)


def _rows(
    runs: Sequence[Measurement], tables: Sequence[Path], cluster: Cluster | None
) -> tuple[list[MeasuredRow], list[Skipped], list[str]]:
    """The rows of measured runs, and of files that hold tables of rows; those left out; what was
    not read of tables.
    """
    rows, skipped, ignored = list[MeasuredRow](), list[Skipped](), list[str]()
    for path in tables:
        found, bad = read_rows(path, cluster)
        rows, skipped, ignored = rows + found, skipped + bad, ignored + ignored_words(path)
    for m in runs:
        if case := case_of(m, cluster):
            known: dict[str, Any] = {
                "seconds": m.sec_per_it,
                "memory_bytes": m.memory_bytes,
                "case": case,
            }
            seen, problem = card(m.log), str(next(iter(m.time_problems), ""))
            if seen and seen.name.partition("-")[0] != case.cluster.gpu.name.partition("-")[0]:
                problem = f"ran on {seen.name}, by its log"
            rows.append(MeasuredRow(row_id=m.name, stack=stack(m, case), problem=problem, **known))
        else:
            reason = (
                "its log does not give shape and topology" if cluster else "no cluster is given"
            )
            skipped.append(Skipped(row_id=m.name, reason=reason))
    return rows, skipped, ignored


def stack(m: Measurement, case: Configuration) -> str:
    """The software stack that a run's engine, or its log's dialect and arguments, show: it selects
    the prior.
    """
    shown = {"megatron-2021": "megatron-lm", "megatron-deepspeed-2022": "megatron-deepspeed"}
    engine = case.engine or shown.get(m.log.dialect, "")
    if engine and m.log.arguments.get("deepspeed.zero_optimization_stage") == 3:
        engine = "deepspeed"
    return stack_of(engine, case.topology.attention)


def case_of(m: Measurement, cluster: Cluster | None = None) -> Configuration | None:
    """The run as the planner sees it, by its plan or its arguments, at the batch size that was
    measured; None where too little is known.

    Logs of 2021 are of attention that stored its scores, the only one there was; the dialect gives
    the year. What the arguments of other logs leave open gets the plain choice: equal layers a
    stage, no offload.
    """
    c, given, is_lm = m.config, m.log.arguments, m.log.dialect == "megatron-lm"
    if m.plan:
        topology = replace(m.plan.topology, gbs=int(c.gbs))
        return Configuration(
            shape=m.plan.shape, topology=topology, cluster=m.plan.cluster, engine=m.plan.engine
        )
    if not (cluster and c.shape and c.gpus and c.mbs and c.gbs):
        return None
    zero = given.get("zero_stage", given.get("deepspeed.zero_optimization_stage", 0))
    try:
        topology = Topology(
            **{
                name: getattr(c, name)
                for name in ("tp", "pp", "dp", "mbs", "recompute", "interleaving")
            },
            gbs=int(c.gbs),
            zero=zero if isinstance(zero, int) else 0,
            sequence_parallel=given.get("sequence_parallel") is True and c.tp > 1,
            precision=c.precision or ("fp16" if cluster.gpu.kind == "cuda" else "fp32"),
            attention="fused" if given.get("use_flash_attn") is True or is_lm else "scores",
        )
    except ValueError:
        return None
    case = Configuration(
        shape=c.shape, topology=topology, cluster=cluster, engine="megatron" if is_lm else ""
    )
    return None if invalid_reason(c.shape, topology) else case
