"""Measured runs as rows that recalibrate the planner, and which short run is next."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.collect import files, measure_all
from trilane.analysis.measure import Measurement
from trilane.analysis.run_config import card
from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, label_of
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.measured_rows import MeasuredRow, Skipped, ignored_words, read_rows, stack_of
from trilane.costmodel.predict import Prediction
from trilane.costmodel.recalibration import NOTHING, Recalibration, predictions, recalibrated
from trilane.logs.written_tables import SUFFIXES
from trilane.planning.search import search
from trilane.planning.space import VARIED
from trilane.utils.tables import Columns, DataFrame, Text
from trilane.utils.validation import require, with_nearest
from trilane.workspace.study import Study, studies

ITERATIONS = 20  # of a short run


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
    """fit() to the runs whose shape and topology are known, on `cluster` unless they have a plan; without rows where
    they contradict each other.

        recalibrate(measure_runs(Study.open("demo")).runs).to_frame()
    """
    typed, skipped = [m for m in runs if m.log.dialect == "table"], list[Skipped]()
    try:
        others = [m for m in runs if m.log.dialect != "table" and m.iterations]
        rows, skipped, ignored = _rows(others, list(dict.fromkeys(m.log.source for m in typed)), cluster)
        return recalibrated(rows, skipped, ignored, cluster, least=1)
    except ValueError as error:
        left_out = (*skipped, Skipped(row_id="all", reason=str(error)))
        return Recalibration(prior=Calibration(), left_out=left_out)


def _rows(
    runs: Sequence[Measurement], tables: Sequence[Path], cluster: Cluster | None
) -> tuple[list[MeasuredRow], list[Skipped], list[str]]:
    """The rows of measured runs, and of files that hold tables of rows; those left out; what was not read of tables."""
    rows, skipped, ignored = list[MeasuredRow](), list[Skipped](), list[str]()
    for path in tables:
        found, bad = read_rows(path, cluster)
        rows, skipped, ignored = rows + found, skipped + bad, ignored + ignored_words(path)
    for m in runs:
        if case := case_of(m, cluster):
            known: dict[str, Any] = {"seconds": m.sec_per_it, "memory_bytes": m.memory_bytes, "case": case}
            seen, problem = card(m.log), str(next(iter(m.time_problems), ""))
            if seen and seen.name.partition("-")[0] != case.cluster.gpu.name.partition("-")[0]:
                problem = f"ran on {seen.name}, by its log"
            rows.append(MeasuredRow(row_id=m.name, stack=stack(m, case), problem=problem, **known))
        else:
            reason = "its log does not give shape and topology" if cluster else "no cluster is given"
            skipped.append(Skipped(row_id=m.name, reason=reason))
    return rows, skipped, ignored


def stack(m: Measurement, case: Configuration) -> str:
    """The software stack that a run's engine, or its log's dialect and arguments, show: it selects the prior."""
    shown = {"megatron-2021": "megatron-lm", "megatron-deepspeed-2022": "megatron-deepspeed"}
    engine = case.engine or shown.get(m.log.dialect, "")
    if engine and m.log.arguments.get("deepspeed.zero_optimization_stage") == 3:
        engine = "deepspeed"
    return stack_of(engine, case.topology.attention)


def case_of(m: Measurement, cluster: Cluster | None = None) -> Configuration | None:
    """The run as the planner sees it, by its plan or its arguments, at the batch size that was measured; None where too
    little is known.

    Logs of 2021 are of attention that stored its scores, the only one there was; the dialect gives the year. What the
    arguments of other logs leave open gets the plain choice: equal layers a stage, no offload.
    """
    c, given, is_lm = m.config, m.log.arguments, m.log.dialect == "megatron-lm"
    if m.plan:
        topology = replace(m.plan.topology, gbs=int(c.gbs))
        return Configuration(shape=m.plan.shape, topology=topology, cluster=m.plan.cluster, engine=m.plan.engine)
    if not (cluster and c.shape and c.gpus and c.mbs and c.gbs):
        return None
    zero = given.get("zero_stage", given.get("deepspeed.zero_optimization_stage", 0))
    try:
        topology = Topology(
            **{name: getattr(c, name) for name in ("tp", "pp", "dp", "mbs", "recompute", "interleaving")},
            gbs=int(c.gbs),
            zero=zero if isinstance(zero, int) else 0,
            sequence_parallel=given.get("sequence_parallel") is True and c.tp > 1,
            precision=c.precision or ("fp16" if cluster.gpu.kind == "cuda" else "fp32"),
            attention="fused" if given.get("use_flash_attn") is True or is_lm else "scores",
        )
    except ValueError:
        return None
    case = Configuration(shape=c.shape, topology=topology, cluster=cluster, engine="megatron" if is_lm else "")
    return None if invalid_reason(c.shape, topology) else case


def next_runs(study: Study, recalibration: Recalibration) -> Columns | Text:
    """The study's plans that have not run, in the order in which to measure them (see short_runs).

        next_runs(study, recalibrate(runs.runs))

    They are those of plans.json, else the best that train the first run's model with its batch on as many GPUs.
    """
    if not recalibration:
        return NOTHING
    first, t = recalibration.cases[0], recalibration.cases[0].topology
    planned = study.plans() if (study.folder / "plans.json").exists() else []
    found = [replace(first, topology=p.topology, engine=p.engine) for p in planned if p.shape == first.shape]
    if not found:
        names = (*VARIED, "precision", "fp32_gradients", "attention", "cp", "adam", "buckets")
        same = {name: getattr(t, name) for name in names} | {"mbs": sorted({1, 2, 4, t.mbs})}
        asked: dict[str, Any] = {"gpus": t.gpus, "gbs": t.gbs, "engine": first.engine or ENGINES[0], **same}
        best = search(first.shape, first.cluster, calibration=recalibration.fitted, top=8, distinct=True, **asked)
        found = [replace(first, topology=candidate.topology) for candidate in best.best_per_sizes(8).rows]
    ran = {(c.shape, c.topology) for c in recalibration.cases}
    new = [c for c in found if (c.shape, c.topology) not in ran]
    table = short_runs(new, predictions(new, recalibration.fitted, recalibration.belief)).head(8)
    return Columns(table) if new else Text("Each plan that was searched has run.")


def short_runs(plans: Sequence[Configuration], predicted: Sequence[Prediction]) -> DataFrame:
    """The plans as short runs of ITERATIONS, the one first that may be the fastest: their seconds with the 90 %
    interval, and the GPU-hours of the run.

    The lower end of each interval decides (optimism in the face of uncertainty: Auer et al. 2002, Machine Learning 47):
    a plan is worth a run while it may be the fastest. Left out: what one run teaches about another plan.
    """
    # imports, NCCL, first kernels: guessed, not measured
    start = [120.0 if c.cluster.gpu.kind == "cuda" else 15.0 for c in plans]
    names = [label_of(c.shape, c.cluster, c.topology, c.engine or ENGINES[0]) for c in plans]
    columns = {n: np.array([getattr(p, n) for p in predicted]) for n in ("sec_per_it", "sec_lo", "sec_hi")}
    gpus, gbs = (np.array([getattr(c.topology, name) for c in plans]) for name in ("gpus", "gbs"))
    table = pd.DataFrame({"plan": names, "gbs": gbs, **columns})
    table["gpu_hours"] = gpus * (start + ITERATIONS * table["sec_per_it"]) / 3600
    return table.iloc[np.argsort(columns["sec_lo"] / gbs)].reset_index(drop=True)
