"""Study: a folder of outputs/ with its notebooks, result files and run folders; nothing else
touches outputs/.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trilane.config import cluster
from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.plan import DERIVED, Plan, plan_from_json
from trilane.config.shapes import read_shape
from trilane.utils.folder_lock import FolderLock
from trilane.utils.frozen import frozen
from trilane.utils.masking import masked
from trilane.utils.process import python, run
from trilane.utils.tables import Json, Record, csv_text
from trilane.utils.validation import from_mapping, parse_integers, read_object, require
from trilane.workspace.installation import outputs_root, stamp
from trilane.workspace.run import Run, is_started, write_text


@frozen
class ModelChoice(Record):
    """A model, the machine, how many of its GPUs, and the batch: what is handed from sizing to the
    search.
    """

    shape: ModelShape
    cluster: Cluster
    cluster_name: str
    gpus: tuple[int, ...]
    gbs: int

    def summary(self) -> str:
        shape = self.shape
        gpus = " or ".join(map(str, self.gpus))
        return (
            f"{shape.parameters / 1e9:.4g}B parameters, {gpus} GPUs of {self.cluster_name}, "
            f"{self.gbs} sequences of {shape.seq_length} tokens an iteration"
        )

    def to_json(self) -> Json:
        """As sizing.json and plans.json have it."""
        return {
            "shape": vars(self.shape),
            "cluster": self.cluster_name,
            "gpus": list(self.gpus),
            "gbs": self.gbs,
        }


class Study(Record):
    """One folder of `outputs/`: notebooks, reports, result files and runs that belong together.

    Study.open("demo").plans()[0]
    """

    def __init__(self, name: str):
        plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", str(name))
        require(plain, "study", repr(name), "must be a plain folder name (letters, digits, . _ -)")
        self.name = name
        self.folder = outputs_root() / name
        # the result files that were loaded, and the start of their SHA-256
        self.read: dict[str, str] = {}

    def summary(self) -> str:
        return f"{self.name!r}, {self.folder}"

    @classmethod
    def create(cls, name: str, *, resume: bool = False) -> "Study":
        """A new study. ValueError where it exists, unless `resume`."""
        study = cls(name)
        try:
            study.folder.mkdir(parents=True, exist_ok=resume)
        except FileExistsError:
            rule = f"{study.folder} exists; resume it, or name another"
            raise ValueError(f"study={name}: {rule}") from None
        return study

    @classmethod
    def open(cls, name: str) -> "Study":
        """The study of that name, created if it does not exist (a notebook run by hand)."""
        return cls.create(name, resume=True)

    def save(self, name: str, values: Json, made_by: str) -> Path:
        """Write the result file `name` (JSON), stamped with what made it; a different earlier
        version is kept.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        with self._one_writer():
            if _holds(path, json.loads(json.dumps(values)), "made_by"):
                return path
            made = {"notebook": made_by, **stamp(), "read": self.read}
            text = json.dumps({**values, "made_by": made}, indent=1)
            return write_text(path, masked(text) + "\n")

    def _one_writer(self) -> contextlib.AbstractContextManager[object]:
        # of two processes that save at a time each keeps the other's version
        return FolderLock([self.folder], ".results.lock", "study").held(20.0)

    def load(self, name: str, made_by: str, **fields: type) -> Json:
        """The result file `name`, with these fields of these types.

        ValueError that names the notebook to run first where it is missing, and the file where it
        is damaged.
        """
        path = self.folder / name
        require(path.exists(), "study", self.name, f"has no {name} yet; run {made_by} first")
        values = read_object(path, "study file", **fields)
        self.read[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:10]
        return values

    def values(self, name: str, made_by: str) -> Json:
        """The result file `name` without the stamp of what made it."""
        return _without(self.load(name, made_by), "made_by")

    def plans(self) -> list[Plan]:
        """The plans that 02_topology wrote, best first, each with its id, whole: what 03 and 07 go
        on from.
        """
        plans = self.load("plans.json", "02_topology", plans=list)["plans"]
        return [plan_from_json(values) for values in plans]

    def model(
        self, shape: str = "", cluster: str = "", gpus: str = "", gbs: int = 0, seq_length: int = 0
    ) -> ModelChoice:
        """The model that a search is for: what is given, and what 01_sizing chose for the rest (""
        or 0).

        `shape` and `seq_length` as in config.shapes.read_shape, `cluster` as in load_cluster,
        `gpus` one or several counts ("1,2,4").
        """
        chosen = {}
        if not (shape and cluster and gpus and gbs):
            chosen = self.load("sizing.json", "01_sizing", shape=dict, cluster=str)
        if shape:
            model_shape = read_shape(shape, seq_length=seq_length)
        else:
            require(not seq_length, "seq_length", seq_length, "needs a shape of yours")
            model_shape = from_mapping(ModelShape, chosen["shape"], "sizing.shape")
        name = cluster or chosen["cluster"]
        return ModelChoice(
            shape=model_shape,
            cluster=load_cluster(name),
            cluster_name=name,
            gpus=tuple(parse_integers("gpus", gpus or str(chosen.get("gpus")))),
            gbs=gbs or chosen.get("gbs", 0),
        )

    def save_table(self, name: str, table: Any) -> Path:
        """Write a pandas DataFrame as CSV; a different earlier version is kept."""
        with self._one_writer():
            return write_text(self.folder / name, csv_text(table))

    def save_figure(self, name: str, figure: Any) -> Path:
        """Write a matplotlib figure as `figures/NAME.png`; nothing for a text, where there is no
        figure.
        """
        path = self.folder / "figures" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        if not isinstance(figure, str):
            figure.savefig(path, dpi=150, bbox_inches="tight")
        return path

    def run_folders(self) -> list[Path]:
        """The run folders of the study, oldest first."""
        plans = self.folder.glob("runs/*/plan.json")
        return [path.parent for path in sorted(plans, key=lambda p: p.stat().st_mtime_ns)]

    def run_folder(
        self,
        plan: Plan,
        files: dict[str, str],
        going: Callable[[Path], object] = lambda folder: False,
    ) -> tuple[Path, bool]:
        """A run folder for `plan` with its `files`, and whether it holds a completed run of an
        equal plan.

        No folder is used by two runs: where the label is taken by a started run or another plan, a
        number is appended. An equal plan that is `going` there now is this run.
        """
        first = self.folder / "runs" / plan.label
        folder = first
        number = 1
        while folder.exists():
            if _holds(folder / "plan.json", plan.to_json(), "calibration", *DERIVED):
                run = Run(folder)
                if run.is_completed or going(folder):
                    return folder, run.is_completed
                if not is_started(folder):
                    break
            number += 1
            folder = first.with_name(f"{plan.label}-{number}")
        for name, text in files.items():
            write_text(folder / name, text)
        return folder, False


def _holds(path: Path, values: Json, *ignored: str) -> bool:
    """Whether the JSON file holds these values but for the ignored; not where it is missing or
    damaged.
    """
    with contextlib.suppress(ValueError):
        return _without(read_object(path, "study file"), *ignored) == _without(values, *ignored)
    return False


def _without(values: Json, *names: str) -> Json:
    return {k: v for k, v in values.items() if k not in names}


def load_cluster(name: str | Cluster) -> Cluster:
    """The cluster of that name or JSON file, or itself; `local` is this machine, measured at first
    use by the engine's benchmark (some seconds; outputs/local.json).

        load_cluster("jz-a100-80g").facts()
    """
    if isinstance(name, Cluster):
        return name
    if name != "local":
        return cluster.cluster(name)
    path = outputs_root() / "local.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        done = run(python("-m", "trilane_engine.bench", str(path)))
        rule = f"this machine could not be measured: {done.stderr.strip()[-300:]}"
        require(done.returncode == 0, "cluster", "local", rule)
    return cluster.cluster(str(path))


def run_folders(names: Iterable[str]) -> list[Path]:
    """The run folders named by paths or studies: a folder with a plan.json, or all below it.
    ValueError where none.

    A folder with a ledger is one of a run whose plan was deleted.
    """
    folders = []
    for name in names:
        require(name != "", "run", repr(name), "is empty")  # it would be the current folder
        if Path(name).exists():
            path = Path(name)
        else:
            path = outputs_root() / name
        if (path / "plan.json").exists() or (path / "jobs.jsonl").exists():
            folders.append(path)
            continue
        below = sorted(plan.parent for plan in path.glob("**/plan.json"))
        require(below, "run", name, "no run folder there, and no study of that name")
        folders += below
    return folders
