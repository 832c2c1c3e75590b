"""Measured runs as rows that recalibrate the planner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trilane.analysis.collect import matches, measure_all
from trilane.analysis.measure import Measurement
from trilane.config.cluster import Cluster
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.measured_rows import (
    MeasuredRow,
    Skipped,
    Source,
    read_rows,
    stack_of,
)
from trilane.costmodel.recalibration import Recalibration, recalibrated
from trilane.logs.checks import HARMLESS
from trilane.logs.written_tables import SUFFIXES
from trilane.utils.validation import require
from trilane.workspace.installation import outputs_root
from trilane.workspace.study import load_cluster

# the stack of a log of that dialect
STACKS = {"megatron-2021": "megatron-lm", "megatron-deepspeed-2022": "megatron-deepspeed"}
OF_LOGS = ("tp", "pp", "dp", "mbs", "recompute", "interleaving")  # of a topology


def fit(rows: Source, cluster: Cluster | str) -> Recalibration:
    """The constants of a cluster fitted to measured rows: a DataFrame with the columns of
    read_rows(); a file, folder or glob of such rows, logs or run folders; or the runs of a study.

        fit(pandas.read_csv("rows.csv"), "jz-a100-80g").fitted

    The prior is what ships for the rows' software (column `engine`). Raises ValueError where no two
    rows can count, for rows of two clusters, in other units than seconds, or that contradict each
    other by a factor of ten.
    """
    machine = load_cluster(cluster)
    if not isinstance(rows, str | Path):
        used, skipped, ignored = read_rows([rows], machine)
        if skipped:  # those of a file are reported
            raise ValueError(f"rows={skipped[0].row_id}: {skipped[0].reason}")
        return recalibrated(used, skipped, ignored, machine, least=2)
    paths = matches(str(rows)) or matches(str(outputs_root() / rows / "runs"))
    rule = "is neither a file, nor a folder with runs or logs, nor a study with runs"
    require(paths, "rows", rows, rule)
    tables = [path for path in paths if path.suffix in SUFFIXES]
    logs = [path for path in paths if path.suffix not in SUFFIXES]
    runs, unread = measure_all(logs, gpu=machine.gpu)
    used, skipped, ignored = read_rows(tables, machine)
    of_runs, unknown = _rows(runs, machine)
    unknown += [Skipped(row_id=str(rows), reason=reason) for reason in unread]
    return recalibrated(used + of_runs, skipped + unknown, ignored, machine, least=2)


def recalibrate(runs: Sequence[Measurement], cluster: Cluster | str | None = None) -> Recalibration:
    """fit() to the runs whose shape and topology are known, on `cluster` unless they have a plan;
    without rows where they contradict each other.

        recalibrate(measure_runs(Study.open("demo")).runs).to_frame()
    """
    machine = load_cluster(cluster) if cluster else None
    try:
        rows, skipped = _rows([run for run in runs if run.iterations], machine)
        return recalibrated(rows, skipped, (), machine, least=1)
    except ValueError as error:
        reason = Skipped(row_id="all", reason=str(error))
        return Recalibration(prior=Calibration(), left_out=(reason,))


def _rows(
    runs: Sequence[Measurement], cluster: Cluster | None
) -> tuple[list[MeasuredRow], list[Skipped]]:
    """The rows of measured runs, and the runs that are left out."""
    rows = []
    skipped = []
    for run in runs:
        case = case_of(run, cluster)
        problems = [problem for problem in run.log.problems if problem.column not in HARMLESS]
        if not case:
            reason = "its log does not give shape and topology, or no cluster is given"
            skipped.append(Skipped(row_id=run.name, reason=reason))
            continue
        # the software that a run's engine, or its log, shows: it selects the prior
        engine = case.engine or STACKS.get(run.log.dialect, "")
        if engine and run.log.arguments.get("deepspeed.zero_optimization_stage") == 3:
            engine = "deepspeed"
        row = MeasuredRow(
            row_id=run.name,
            seconds=run.sec_per_it,
            memory_bytes=run.memory_bytes,
            case=case,
            stack=stack_of(engine, case.topology.attention),
            problem="; ".join(map(str, problems)),
        )
        rows.append(row)
    return rows, skipped


def case_of(run: Measurement, cluster: Cluster | None = None) -> Configuration | None:
    """The run as the planner sees it, by its plan or its arguments, at the batch size that was
    measured; None where too little is known.

    Logs of 2021 are of attention that stored its scores, the only one there was; the dialect gives
    the year. What the arguments of other logs leave open gets the plain choice: equal layers a
    stage, no offload.
    """
    config = run.config
    plan = run.plan
    if plan:
        topology = replace(plan.topology, gbs=int(config.gbs))
        return Configuration(
            shape=plan.shape, topology=topology, cluster=plan.cluster, engine=plan.engine
        )
    if not (cluster and config.shape and config.gpus and config.mbs and config.gbs):
        return None
    if config.shape.experts:  # how they are spread over GPUs is a plan's
        return None
    given = run.log.arguments
    is_new_megatron = run.log.dialect == "megatron-lm"
    is_fused = given.get("use_flash_attn") is True or is_new_megatron
    zero = given.get("zero_stage", given.get("deepspeed.zero_optimization_stage", 0))
    usual = "fp16" if cluster.gpu.kind == "cuda" else "fp32"
    try:
        topology = Topology(
            **{name: getattr(config, name) for name in OF_LOGS},
            gbs=int(config.gbs),
            zero=zero if isinstance(zero, int) else 0,
            sequence_parallel=given.get("sequence_parallel") is True and config.tp > 1,
            precision=config.precision or usual,
            attention="fused" if is_fused else "scores",
        )
    except ValueError:
        return None
    if invalid_reason(config.shape, topology):
        return None
    engine = "megatron" if is_new_megatron else ""
    return Configuration(shape=config.shape, topology=topology, cluster=cluster, engine=engine)
