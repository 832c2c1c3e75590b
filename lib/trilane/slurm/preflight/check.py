"""The pre-flight check of a job: what would fail or waste GPU hours, each finding with its rule and its remedy."""

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.slurm import client
from trilane.slurm.preflight import purpose, resources, timing
from trilane.slurm.preflight import script as script_checks
from trilane.slurm.preflight.finding import REFUSAL, RULES, WARNING, Findings, JobCheck, JobFinding, warn
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.validation import read_text, require_known

MOST_BYTES = 1 << 20  # of a script


def check_job(
    plan: Plan,
    site: Site,
    request: JobRequest,
    folder: Path,
    allow: Collection[str] = (),
    script: Path | None = None,
    calibration: Calibration | None = None,
) -> Findings:
    """Every finding about the run in `folder`, refusals first; the rules in `allow` only warn.

    `calibration` has the constants that predicted the plan, where other than the cluster's. It
    reads `script`, else the folder's job.sbatch, else the script that would be written.
    """
    for rule in allow:
        require_known("allow", rule, {*RULES, *REMEDIES, *(f.name for f in fields(JobRequest))})
    path = script or folder / SCRIPT
    try:
        is_written = script is not None or path.exists()
        text = read_text(path, "script", MOST_BYTES) if is_written else render("train", plan, site, request)
    except ValueError as error:
        return Findings([of_error(error)])
    case = JobCheck(plan, site, request, folder, text, path.name, calibration)
    found: list[JobFinding] = []
    for find in (*resources.RULES, *timing.RULES, *purpose.RULES, *script_checks.RULES):
        try:
            found += find(case)
        except ValueError as error:  # an #SBATCH line edited by hand
            found.append(of_error(error))
    if not site.is_local and (not client.is_installed() or any(UNCONFIGURED in f.message for f in found)):
        found = off_cluster(found)
    found = [replace(f, level=WARNING) if f.rule in allow else f for f in dict.fromkeys(found)]
    return Findings(sorted(found, key=lambda f: f.level != REFUSAL))


UNCONFIGURED = "establish a configuration source"  # by SLURM's commands without a slurm.conf
# what is read off the machine on which the check runs, which must then be the cluster's
OF_MACHINE = ("sbatch", "wheel", "data", "corpus", "container", "shared", "disk", "inodes")


def off_cluster(found: Collection[JobFinding]) -> list[JobFinding]:
    """The findings, those about a machine that is not the cluster in one: it says nothing about the cluster's."""
    about = list(dict.fromkeys(f.rule for f in found if f.rule in OF_MACHINE and f.rule != "sbatch"))
    message = "this machine is not the cluster (sbatch is not installed, or not configured): SLURM was not asked"
    unknown = f"; what this machine lacks ({', '.join(about)}) the cluster may have" if about else ""
    rest = [f for f in found if f.rule not in OF_MACHINE]
    return [*rest, warn("sbatch", message + unknown, "run the check on a login node")]


REMEDIES = {
    "gbs": "choose a global batch size that mbs x dp divides, or fewer replicas",
    "ramp": "choose start, increment and gbs that mbs x dp divides at every step, or fewer replicas in the first links",
    "tp x pp x dp": "choose tp, pp and dp whose product fills whole nodes and is not more than the cluster has",
    "tp": "choose a tensor-parallel size that divides heads, hidden size and vocabulary",
    "pp": "choose a pipeline depth that divides the layers, or another partition",
    "precision": "use fp16 (a V100 has no bf16), or cards that have it",
}


def of_error(error: ValueError) -> JobFinding:
    """A ValueError of the form "field=value: the rule" as a refusal."""
    field = str(error).partition("=")[0]
    remedy = REMEDIES.get(field, "correct it in the plan, the script, the request or the site's file")
    return JobFinding(level=REFUSAL, rule=field, message=str(error), remedy=remedy)


def refused(findings: Collection[JobFinding]) -> Findings:
    """The refusals among them."""
    return Findings(f for f in findings if f.level == REFUSAL)


def line(finding: JobFinding) -> str:
    """A finding as two lines of text."""
    return f"{finding.level:7} [{finding.rule}] {finding.message}\n        {finding.remedy}"
