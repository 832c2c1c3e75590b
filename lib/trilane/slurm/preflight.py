"""The pre-flight check of a job: what would fail or waste GPU hours, each finding with its rule and
its remedy.
"""

import difflib
import re
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from trilane.config.plan import Plan
from trilane.slurm import checks, client
from trilane.slurm.checks import (
    REFUSAL,
    WARNING,
    Findings,
    JobCheck,
    JobFinding,
    refusal,
    warning,
)
from trilane.slurm.script import SCRIPT, render
from trilane.slurm.sites import JobRequest, Site
from trilane.utils.validation import shipped_json
from trilane.workspace.run import Run

# about this machine, where it is not the cluster
OF_MACHINE = ("data", "corpus", "container", "shared", "disk", "sbatch")
# lines of a difference that are shown
SHOWN = 20


def check_job(
    plan: Plan, site: Site, request: JobRequest, run: Run, allow: Collection[str] = ()
) -> list[JobFinding]:
    """Every finding about the plan in that run folder, refusals first; the rules in `allow` only
    warn.
    """
    script = ""
    try:
        if not site.is_local:
            script = render("train", plan, site, request)
    except ValueError as error:
        return [of_error(error)]
    job = JobCheck(plan, site, request, run, script)
    findings: list[JobFinding] = []
    for check in CHECKS:
        try:
            findings += check(job)
        except ValueError as error:
            findings.append(of_error(error))
    # what SLURM's commands say without a slurm.conf
    unconfigured = "establish a configuration source"
    is_configured = not any(unconfigured in finding.message for finding in findings)
    if not site.is_local and not (client.is_installed() and is_configured):
        findings = [finding for finding in findings if finding.rule not in OF_MACHINE]
        message = "this machine is not the cluster (sbatch is not installed, or not configured): "
        message += "what it has of data and disks says nothing about the cluster's"
        findings.append(warning("sbatch", message, "run the check on a login node"))
    leveled = []
    for finding in dict.fromkeys(findings):
        level = WARNING if finding.rule in allow else finding.level
        leveled.append(finding._replace(level=level))
    return sorted(leveled, key=lambda finding: finding.level != REFUSAL)


def of_error(error: ValueError) -> JobFinding:
    """A ValueError of the form "field=value: the rule" as a refusal."""
    remedy = "correct it in the plan, the request or the site's file"
    return refusal(str(error).partition("=")[0], str(error), remedy)


def refused(findings: Collection[JobFinding]) -> list[JobFinding]:
    """The refusals among them."""
    return [finding for finding in findings if finding.level == REFUSAL]


def accepted(job: JobCheck) -> Findings:
    """The container's image exists, and `sbatch --test-only` accepts the script: partition,
    constraint, account, QoS, node and GPU counts.
    """
    image = job.site.image_file
    if image and not Path(image).exists():
        remedy = "pull or build the image, or correct the site's file"
        yield refusal("container", f"container_image={image}: no such file", remedy)
    if job.site.is_local:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(job.script)
        file.flush()
        try:
            client.require_answer()
            client.test_only(Path(file.name))
        except ValueError as error:
            remedy = "sinfo lists the partitions, sacctmgr show assoc your accounts and QoS"
            yield refusal("sbatch", str(error), remedy)


def edited(job: JobCheck) -> Findings:
    """job.sbatch is what plan, site and options render, so that no other command or option hides in
    it; of one that is not, the traps are named that its text shows.
    """
    path = job.run.folder / SCRIPT
    if job.site.is_local or not path.exists() or path.read_bytes() == job.script.encode():
        return
    # lines as bash has them: a carriage return or U+2028 ends none
    script = path.read_bytes().decode("utf-8", "replace")
    both = (job.script.split("\n"), script.split("\n"))
    lines = difflib.unified_diff(*both, "rendered", SCRIPT, n=0, lineterm="")
    shown = [f"script={SCRIPT}: is not what plan, site and options render", *lines]
    remedy = "give the options it was written with, or delete it, or --allow changes"
    yield refusal("changes", "\n".join(shown[: SHOWN + 1]), remedy)
    # its text is looked at, not followed, and of endless lines only so much that it takes no time
    joined = script[: 1 << 16].replace("\\\n", " ").split("\n")
    code = [line[:4000] for line in joined if not re.match(r"\s*#(?!SBATCH)", line)]
    text = "\n".join(code)
    for rule, trap in shipped_json("script_traps").items():
        patterns = [*trap["has"], trap["lacks"]]
        *has, lacks = [re.search(pattern, text, re.MULTILINE) for pattern in patterns]
        if all(has) and not lacks:
            yield refusal(rule, trap["message"], trap["remedy"])


CHECKS: tuple[Callable[[JobCheck], Findings], ...] = (
    checks.nodes,
    checks.limits,
    checks.memory,
    checks.traced,
    checks.data,
    checks.storage,
    checks.time,
    accepted,
    edited,
)
