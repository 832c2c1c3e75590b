"""The subject of the pre-flight check (`JobCheck`), and one result of it (`JobFinding`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trilane.config.cluster import Cluster
from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.predict import Prediction, predict_on
from trilane.slurm import client
from trilane.slurm.script import SCRIPT, directives, nodes_of
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.tables import Columns, DataFrame, Table
from trilane.utils.validation import require_known

REFUSAL, WARNING = "refusal", "warning"
# Every rule of the check; an impossible value is refused under its own field's name.
RULES = (
    *(
        "engine",
        "cluster",
        "nodes",
        "tp",
        "precision",
        "wheel",
        "qos",
        "qos time",
        "qos gpus",
        "account",
        "memory",
        "host memory",
    ),
    *(
        "time",
        "checkpoints",
        "site",
        "script",
        "spares",
        "kill-on-bad-exit",
        "pipefail",
        "signal",
        "error file",
        "port",
        "code",
    ),
    *("internet", "container", "bash", "sbatch", "data", "corpus", "shared", "tokens", "epochs", "learning rate"),
    *("disk", "inodes", "run folder", "checkpoint"),
)


@dataclass(frozen=True, kw_only=True)
class JobFinding:
    """One problem of a job, certain (a refusal) or likely (a warning), with its remedy."""

    level: str
    rule: str
    message: str
    remedy: str

    def __post_init__(self) -> None:
        require_known("level", self.level, (REFUSAL, WARNING))

    def to_json(self) -> dict[str, str]:
        """The JSON object of `trilane slurm check`; the key of the message is `says`."""
        return {"level": self.level, "rule": self.rule, "says": self.message, "remedy": self.remedy}


class Findings(list[JobFinding], Table):
    """The findings about one job, refusals first."""

    def to_frame(self) -> DataFrame:
        names = ("level", "rule", "message", "remedy")
        return Columns({name: [getattr(f, name) for f in self] for name in names}).to_frame()


def refuse(rule: str, message: str, remedy: str) -> JobFinding:
    """A refusal; the rule is one of RULES."""
    return JobFinding(level=REFUSAL, rule=rule, message=message, remedy=remedy)


def warn(rule: str, message: str, remedy: str) -> JobFinding:
    """A warning; the rule is one of RULES."""
    return JobFinding(level=WARNING, rule=rule, message=message, remedy=remedy)


@dataclass(frozen=True)
class JobCheck:
    """A job before its submission: the plan of a run folder with its script, edited by hand or not."""

    plan: Plan
    site: Site
    request: JobRequest
    folder: Path
    script: str
    name: str = SCRIPT  # the script's file
    calibration: Calibration | None = None  # the constants that predicted the plan

    @cached_property
    def cluster(self) -> Cluster:
        """The nodes that the job gets."""
        return nodes_of(self.plan, self.site)

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted time and memory on these nodes."""
        return predict_on(self.plan, self.cluster, self.calibration)

    @cached_property
    def directives(self) -> dict[str, str]:
        """The script's own #SBATCH options, which are decisive; ValueError where they cannot be read."""
        return directives(self.script)

    @property
    def base(self) -> Path:
        """Where the plan's relative paths begin: in the run folder of a job; here, in the current folder."""
        return Path() if self.site.is_local else self.folder.resolve()

    @cached_property
    def slurm_problem(self) -> str:
        """Why SLURM cannot be asked: it is not installed here, or does not answer; "" where it can."""
        try:
            client.require_answer()
        except client.SlurmUnreachable as error:
            return str(error)
        return "" if client.is_installed() else "sbatch is not installed here, so SLURM was not asked"

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.plan.topology.gpus // self.cluster.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node of the job."""
        return min(self.plan.topology.gpus, self.cluster.gpus_per_node)

    @property
    def spares(self) -> int:
        """Nodes that the script asks for beyond those, and can use: a dead one must not end the job."""
        asked = self.directives.get("nodes", "")
        return max(0, int(asked) - self.nodes) if "no-kill" in self.directives and asked.isdecimal() else 0


Rule = Callable[[JobCheck], Iterator[JobFinding]]
