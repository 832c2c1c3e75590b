"""Guard: what must be refused before GPUs are spent, each finding with its rule and its remedy."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trilane import calibration
from trilane.checks import require, require_known
from trilane.hardware import Cluster
from trilane.plan import Plan
from trilane.prediction import Prediction, predict
from trilane.request import Request
from trilane.script import nodes_of, render
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
        """The script's own #SBATCH options, which are what counts."""
        lines = [line[7:].strip() for line in self.script.splitlines() if line.startswith("#SBATCH ")]
        pairs = (line.removeprefix("--").partition("=") for line in lines)
        return {name.strip(): value.strip() for name, _, value in pairs}

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.plan.topology.gpus // self.cluster.gpus_per_node)


Rule = Callable[[Case], Iterator[Finding]]


def check(plan: Plan, site: Site, request: Request, folder: Path, allow: Collection[str] = ()) -> list[Finding]:
    """Every finding about the run in `folder`, refusals first; the rules in `allow` only warn.

    The folder's job.sbatch is looked at where there is one, else the script that would be written.
    """
    from trilane.guard_cost import RULES as COST
    from trilane.guard_place import RULES as PLACE
    from trilane.guard_script import RULES as SCRIPT

    path = folder / "job.sbatch"
    try:
        script = path.read_text(encoding="utf-8") if path.exists() else render("train", plan, site, request)
    except ValueError as error:
        return [of_error(error)]
    case = Case(plan, site, request, folder, script)
    found: list[Finding] = []
    for rule in (*COST, *SCRIPT, *PLACE):
        found += rule(case)
    for name in allow:
        require(any(f.rule == name for f in found), "allow", name, "no finding has this rule")
    found = [replace(f, level=WARNING) if f.rule in allow else f for f in found]
    return sorted(found, key=lambda f: f.level != REFUSAL)


REMEDIES = {
    "gbs": "choose a global batch size that mbs x dp divides, or fewer replicas",
    "ramp": "choose start, increment and gbs that mbs x dp divides at every step, or fewer replicas in the first links",
    "tp x pp x dp": "choose tp, pp and dp whose product fills whole nodes and is not more than the cluster has",
    "tp": "choose a tensor-parallel size that divides heads, hidden size and vocabulary",
    "pp": "choose a pipeline depth that divides the layers, or another partition",
    "precision": "use fp16 (a V100 has no bf16), or cards that have it",
}


def of_error(error: ValueError) -> Finding:
    """A refusal out of "field=value: the rule"."""
    field = str(error).partition("=")[0]
    return refuse(field, str(error), REMEDIES.get(field, "correct it in the plan, the request or the site's file"))
