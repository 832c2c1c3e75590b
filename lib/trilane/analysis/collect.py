"""Gather: the measured runs of a study, or of any file, folder or glob of logs."""

import glob
from dataclasses import dataclass, replace
from pathlib import Path

from trilane.analysis.measure import Measurement, measure_log
from trilane.analysis.record import KEEP, plan_beside
from trilane.config.cluster import Cluster
from trilane.config.plan import read_plan
from trilane.documents.runs import read_runs
from trilane.logs.run import read_run_folder
from trilane.utils.validation import require
from trilane.workspace.study import Study

NOT_LOGS = (".json", ".py", ".md", ".ipynb", ".html", ".png", ".csv", ".pt", ".bin", ".idx", ".sbatch", ".sh")


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The runs, each with a name of its own, also those without an iteration; and files that are no log, and why."""

    runs: tuple[Measurement, ...]
    unread: tuple[str, ...] = ()

    @property
    def timed(self) -> list[Measurement]:
        """The runs that printed iterations with their time."""
        return [m for m in self.runs if m.iterations]


def gather(study: Study, logs: str, warm_up: int, cluster: Cluster | None = None) -> Gathered:
    """The runs of `logs` (a file, a folder, a glob; run on `cluster` where given), or of the study where that is empty.

    Raises ValueError where there is none. A run folder counts as its run.log with the plan beside it; in another folder
    every file counts that does not look like something else.
    """
    if not logs:
        folders = study.run_folders()
        require(bool(folders), "study", study.name, "has no run; run 03_launch first, or name logs")
        return Gathered(runs=tuple(_of_folder(folder, warm_up) for folder in folders))
    runs, unread = list[Measurement](), list[str]()
    for path in files(logs):
        try:
            runs += [_of_folder(path, warm_up)] if path.is_dir() else _of_file(path, warm_up, cluster)
        except (ValueError, OSError) as error:
            unread.append(str(error))
    require(bool(runs), "logs", logs, f"no log among them: {unread[0] if unread else 'no such file'}")
    return Gathered(runs=tuple(_numbered(runs)), unread=tuple(unread))


def files(logs: str) -> list[Path]:
    """The files and run folders that a path or a glob means, by name."""
    found = list[Path]()
    for path in sorted(map(Path, glob.glob(str(Path(logs).expanduser()), recursive=True))):
        if path.is_dir() and not _is_run(path):
            inside = sorted(p for p in path.rglob("*") if p.is_dir() and _is_run(p))
            alone = [p for p in path.rglob("*") if p.is_file() and not any(run in p.parents for run in inside)]
            found += [*inside, *sorted(p for p in alone if p.suffix not in NOT_LOGS and p.name[0] != ".")]
        else:
            found.append(path)
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "plan.json").is_file() and (folder / "run.log").is_file()


def _of_folder(folder: Path, warm_up: int) -> Measurement:
    return measure_log(read_run_folder(folder), read_plan(folder / "plan.json"), warm_up, name=folder.name)


def _of_file(path: Path, warm_up: int, cluster: Cluster | None) -> list[Measurement]:
    gpu = cluster.gpu if cluster and cluster.gpu.kind == "cuda" else None
    return [measure_log(log, None, warm_up, gpu=gpu) for log in read_runs(path)]


def _numbered(runs: list[Measurement]) -> list[Measurement]:
    """The runs with a number in front of what is known of them: file names are long, and a file may hold several."""
    named = []
    for number, m in enumerate(runs, 1):
        s = m.setup
        known = f" tp{s.tp}-pp{s.pp}-dp{s.dp}" + f"-mbs{s.mbs}" * (s.mbs > 0) if s.gpus else f" {m.log.dialect}"
        named.append(m if m.plan else replace(m, name=f"{number}{known}"))
    return named


def measurements(path: str) -> list[Measurement]:
    """The measured runs of a log, or of a run folder's; ValueError where there is none."""
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in ("steps.jsonl", "run.log") if (file / name).is_file()), file)
        require(file.is_file(), "run", path, "holds neither steps.jsonl nor run.log")
    return [measure_log(log, plan_beside(log)) for log in read_runs(file, KEEP)]
