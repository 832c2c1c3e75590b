"""Finding: one thing wrong with a job that is about to be submitted; Case: what the guard looks at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trilane import calibration
from trilane.checks import require_known
from trilane.directives import directives
from trilane.hardware import Cluster
from trilane.job_request import Request
from trilane.plan import Plan
from trilane.prediction import Prediction, predict
from trilane.script import SCRIPT, nodes_of
from trilane.sites import Site

REFUSAL, WARNING = "refusal", "warning"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong (a refusal) or likely to be (a warning), and what helps."""

    level: str
    rule: str
    says: str
    remedy: str

    def __post_init__(self) -> None:
        require_known("level", self.level, (REFUSAL, WARNING))


def refuse(rule: str, says: str, remedy: str) -> Finding:
    """A refusal."""
    return Finding(level=REFUSAL, rule=rule, says=says, remedy=remedy)


def warn(rule: str, says: str, remedy: str) -> Finding:
    """A warning."""
    return Finding(level=WARNING, rule=rule, says=says, remedy=remedy)


@dataclass(frozen=True)
class Case:
    """What is about to be submitted: the plan of a run folder with its script, edited by hand or not."""

    plan: Plan
    site: Site
    request: Request
    folder: Path
    script: str
    name: str = SCRIPT  # the script's file

    @cached_property
    def cluster(self) -> Cluster:
        """The nodes that the job gets."""
        return nodes_of(self.plan, self.site)

    @cached_property
    def prediction(self) -> Prediction:
        """Time and memory on these nodes."""
        plan = self.plan
        return predict(plan.shape, plan.topology, self.cluster, calibration.default(self.cluster))

    @cached_property
    def directives(self) -> dict[str, str]:
        """The script's own #SBATCH options, which are what counts; ValueError where they cannot be read."""
        return directives(self.script)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.plan.topology.gpus // self.cluster.gpus_per_node)


Rule = Callable[[Case], Iterator[Finding]]
