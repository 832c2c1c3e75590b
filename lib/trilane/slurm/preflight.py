"""The pre-flight check of a job: what would fail or waste GPU hours, each finding with its rule and
its remedy.
"""

import contextlib
import difflib
import os
import pwd
import re
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path

from trilane.config.engines import installed_version, version_misfit
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
from trilane.slurm.script import SCRIPT, gres_gpus, render
from trilane.slurm.sites import JobRequest, Site, seconds_of
from trilane.utils.process import imports_triton, install_command, run
from trilane.utils.validation import read_text, require_known
from trilane.workspace.installation import checkout
from trilane.workspace.prepared_corpora import existing_pair
from trilane.workspace.run import Run

# Every rule of the check, as --allow takes them; an impossible value is refused under its own
# field's name.
NAMES = (
    *("engine", "cluster", "nodes", "tp", "precision", "qos time", "qos gpus", "account"),
    *("memory", "trace", "host memory", "time", "checkpoints", "script", "changes", "owner"),
    *("kill-on-bad-exit", "pipefail", "signal", "internet", "launcher", "container", "bash"),
    *("sbatch", "data", "corpus", "shared", "tokens", "disk", "inodes", "run folder"),
    *("checkpoint", "gbs", "ramp", "tp x pp x dp", "pp"),
)
# about this machine, where it is not the cluster
OF_MACHINE = ("data", "corpus", "container", "shared", "disk", "inodes", "sbatch")
# options of a request that sbatch would choose itself where the script lacks them
DIRECTIVES = {
    "account": "account",
    "qos": "qos",
    "partition": "partition",
    "constraint": "constraint",
    "reservation": "reservation",
    "exclude": "exclude",
    "time_limit": "time",
    "mail": "mail-user",
}
# lines of a difference that are shown
SHOWN = 20


def check_job(
    plan: Plan, site: Site, request: JobRequest, run: Run, allow: Collection[str] = ()
) -> list[JobFinding]:
    """Every finding about the plan in that run folder, refusals first; the rules in `allow` only
    warn.

    It reads the folder's job.sbatch, else the script that would be written.
    """
    for name in allow:
        require_known("allow", name, {*NAMES, *(field.name for field in fields(JobRequest))})
    path = run.folder / SCRIPT
    try:
        if path.exists():
            script = read_text(path, "script", 1 << 20)
        else:
            script = render("train", plan, site, request)
    except ValueError as error:
        return [of_error(error)]
    job = JobCheck(plan, site, request, run, script)
    findings: list[JobFinding] = []
    for check in CHECKS:
        try:
            findings += check(job)
        except ValueError as error:  # an #SBATCH line edited by hand
            findings.append(of_error(error))
    # what SLURM's commands say without a slurm.conf
    unconfigured = "establish a configuration source"
    is_configured = not any(unconfigured in finding.message for finding in findings)
    if not site.is_local and not (client.is_installed() and is_configured):
        findings = _off_cluster(findings)
    found = []
    for finding in dict.fromkeys(findings):
        found.append(replace(finding, level=WARNING) if finding.rule in allow else finding)
    return sorted(found, key=lambda finding: finding.level != REFUSAL)


def _off_cluster(findings: Collection[JobFinding]) -> list[JobFinding]:
    """The findings, those about a machine that is not the cluster in one: it says nothing about the
    cluster's.
    """
    message = "this machine is not the cluster (sbatch is not installed, or not configured): what "
    message += "it has of data and disks says nothing about the cluster's"
    others = [finding for finding in findings if finding.rule not in OF_MACHINE]
    return [*others, warning("sbatch", message, "run the check on a login node")]


def of_error(error: ValueError) -> JobFinding:
    """A ValueError of the form "field=value: the rule" as a refusal."""
    remedy = "correct it in the plan, the script, the request or the site's file"
    return refusal(str(error).partition("=")[0], str(error), remedy)


def refused(findings: Collection[JobFinding]) -> list[JobFinding]:
    """The refusals among them."""
    return [finding for finding in findings if finding.level == REFUSAL]


def _starts_ranks(job: JobCheck) -> bool:
    """Whether srun starts the ranks directly, one task each."""
    form = r"^[^#\n]*(srun [^\n]*|exec python )-m trilane_engine "
    return re.search(form, job.script, re.M) is not None


def resources(job: JobCheck) -> Findings:
    """The script, which may have been written earlier or edited, asks for what the plan needs and
    for the options that are given now: what it lacks, sbatch would choose.
    """
    given = job.request.given()
    gpus = job.plan.topology.gpus
    used = job.gpus_per_node
    spares = job.request.spares if "spares" in given else job.spares
    nodes = job.nodes + spares
    tasks = used if _starts_ranks(job) else 1
    # options of which one must be there, its value ("": any), and whether it is needed
    wanted = [
        (("nodes",), str(nodes), nodes > 1),
        (("ntasks-per-node", "ntasks"), str(tasks), tasks > 1),
        (("gres", "gpus-per-node"), f"gpu:{used}", job.cluster.gpu.kind == "cuda"),
        (("cpus-per-task", "cpus-per-gpu", "exclusive"), "", True),
        (("constraint", "partition", "nodelist"), "", bool(job.site.constraint)),
    ]
    for field, directive in DIRECTIVES.items():
        if field in given:
            wanted.append(((directive,), str(getattr(job.request, field)), True))
    remedy = f"edit {SCRIPT}, or write it again: `trilane slurm submit --rewrite --dry-run`"
    for names, value, is_needed in [] if job.site.is_local else wanted:
        has = {name: job.directives[name] for name in names if name in job.directives}
        is_wrong = is_needed and not has
        for name, own in has.items():
            is_wrong |= bool(value) and not _is_same(name, own, value, nodes)
        if is_wrong:
            shown = ", ".join(f"--{name}={own}" for name, own in has.items()) or "none"
            needed = f"--{names[0]}={value or '...'} is needed"
            message = f"{needed} (for {gpus} GPUs and the options given), {SCRIPT} has {shown}"
            yield refusal("script", message, remedy)
    started = re.search(r"--nproc-per-node=(\d+)", job.script)
    if started and int(started[1]) != used:
        message = f"{started[1]} processes per node: the plan's {gpus} GPUs need {used}"
        yield refusal("script", message, remedy)


def _is_same(name: str, own: str, value: str, nodes: int) -> bool:
    """Whether an option of the script means that value."""
    if name == "time" and own:
        return seconds_of(own) == seconds_of(value)
    if name == "gpus-per-node":
        own = f"gpu:{own}"
    if name in ("gres", "gpus-per-node"):
        return gres_gpus(own) == gres_gpus(value)
    if name == "ntasks":
        return own == str(nodes * int(value))
    return own in (value, f"{value}-{value}")


def traps(job: JobCheck) -> Findings:
    """Nothing keeps a failed job running, or hides its failure; signals reach the ranks."""
    script = job.script
    if "srun" in script and "--kill-on-bad-exit=1" not in script:
        message = "srun without --kill-on-bad-exit=1: when one node fails, the others wait until "
        remedy = "srun --kill-on-bad-exit=1 --wait=15 ..."
        yield refusal("kill-on-bad-exit", f"{message}the time limit", remedy)
    if "| tee" in script and "pipefail" not in script:
        message = "a pipe into tee without pipefail: a failed run counts as COMPLETED"
        yield refusal("pipefail", message, "set -euo pipefail")
    # our torchrun, or a shell with a trap of its own
    forwards = r"""^[^#\n]*(trilane_engine\.torchrun|trap ["'][^"'\n]+["'] USR1)"""
    handles = re.search(forwards, script, re.M) or _starts_ranks(job)
    if "signal" in job.directives and not handles:
        message = "SIGUSR1 before the limit may reach only the launcher, which ignores it or ends"
        remedy = "python -m trilane_engine.torchrun forwards it; or trap 'touch save' USR1"
        yield refusal("signal", f"{message}: nothing is saved", remedy)


def internet(job: JobCheck) -> Findings:
    """Nothing needs the internet where compute nodes have none."""
    tokenizer = job.plan.data.tokenizer
    if tokenizer != "bytes" and not Path(tokenizer).is_dir():
        pairs = [existing_pair(str(job.run.folder / part.source)) for part in job.plan.data.parts]
        if not all(pairs):
            message = f"tokenizer {tokenizer} is not a folder here"
            yield refusal("internet", message, "download it first, and name its folder")


def accepted(job: JobCheck) -> Findings:
    """The container's image exists, bash can parse the script, and `sbatch --test-only` accepts it:
    partition, constraint, account, QoS, node and GPU counts.
    """
    image = job.site.image_file
    if image and not Path(image).exists():
        remedy = "pull or build the image, or correct the site's file"
        yield refusal("container", f"container_image={image}: no such file", remedy)
    done = run(["bash", "-n"], input=job.script)
    if done.returncode:
        line = done.stderr.strip().partition("\n")[0]
        yield refusal("bash", f"script: {line}", "correct it")
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


def owned(job: JobCheck) -> Findings:
    """Nobody else decides what the job runs: whoever may write to the run folder may replace what
    is in it.

    Left out: access lists, and the folders above.
    """
    if job.site.is_local:
        return
    folder = job.run.folder
    for path in (folder / SCRIPT, folder / "plan.json", folder):
        problem = _foreign(path) if path.exists() else ""
        if problem:
            remedy = "copy what you want to a run folder of your own; or `chmod go-w` what is yours"
            message = f"{path} {problem}; a job runs it in your name"
            yield refusal("owner", message, remedy)


def _foreign(path: Path) -> str:
    """Who else may change a file; "" where only this user and root may."""
    stat = path.stat()
    if stat.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {stat.st_uid}"
    # some systems give each user a group of that number, and umask 002
    others = 0o022
    with contextlib.suppress(KeyError):
        if stat.st_gid == pwd.getpwuid(os.geteuid()).pw_gid == os.geteuid():
            others = 0o002
    if stat.st_mode & others:
        return "is writable by others"
    return ""


def edited(job: JobCheck) -> Findings:
    """The commands of job.sbatch are those that plan, site and options render; the difference is
    shown.
    """
    path = job.run.folder / SCRIPT
    if job.site.is_local or not path.exists():
        return
    try:
        spares = job.request.spares or job.spares
        wanted = render("train", job.plan, job.site, replace(job.request, spares=spares))
    except ValueError:  # a plan that has no script is refused by another rule
        return
    # lines as bash has them: a carriage return or U+2028 before a # would pass what follows as a
    # comment
    script = path.read_bytes().decode("utf-8-sig", "replace")
    both = (wanted.split("\n"), script.split("\n"))
    lines = list(difflib.unified_diff(*both, "rendered", SCRIPT, n=0, lineterm=""))
    if not lines:
        return
    # options are other rules', but for files and variables (by their beginnings); a quote in a
    # comment may end a text
    option = r"#SBATCH.*\s-([A-Za-z]*[ioeD]|-in|-ou|-er|-exp|-ch|-ge)"
    command = re.compile(rf"[+-](\s*(#!|[^\s#])|.*[\"'`\\]|{option})")
    text = [f"script={SCRIPT}: is not what plan, site and options render"]
    text += [line[:160] for line in lines[:SHOWN]]
    if len(lines) > SHOWN:
        text.append(f"... {len(lines) - SHOWN} lines more")
    remedy = "give the options it was written with, or --rewrite, or --accept-changes"
    for line in lines[2:]:
        if command.match(line) or not line.replace("\t", " ").isprintable():
            yield refusal("changes", "\n".join(text), remedy)
            return
    yield warning("changes", "\n".join(text), remedy)


def installed(job: JobCheck) -> Findings:
    """What the job's environment has beside megatron-core, where it is a folder that can be seen
    here.

    megatron-core imports triton from 0.18 on and does not require it; ft_launcher needs
    nvidia-resiliency-ext. Left out: containers, and an environment that takes packages of its
    system, which a module may bring on the nodes.
    """
    folder = Path(job.request.environment or sys.prefix)
    root = checkout()
    if root and not job.request.environment:
        folder = root / ".venv"
    packages = [str(place) for place in folder.glob("lib/python3*/site-packages")]
    settings = folder / "pyvenv.cfg"
    is_open = settings.is_file() and "site-packages = true" in settings.read_text(errors="replace")
    if job.site.container or not packages or is_open:
        return
    core = installed_version("megatron-core", packages)
    if imports_triton(core) and not installed_version("triton", packages):
        message = f"triton=missing: megatron-core {core} in {folder} imports it"
        yield refusal("launcher", message, "pip install triton, there")
    topology = job.plan.topology
    uses_engine = topology.precision == "fp8" or topology.overlap_tp or job.plan.run.fused == "te"
    misfit = version_misfit("transformer-engine[pytorch]", packages)
    if uses_engine and misfit:
        yield refusal("engine", misfit, "in the job's environment")
    name = "nvidia-resiliency-ext"
    if misfit := version_misfit(name, packages):
        yield refusal("launcher", misfit, "uninstalled, --launcher torchrun trains")
    if "--ft-" in job.script and not installed_version(name, packages):
        message = f"launcher=ft_launcher: needs {name} in {folder}"
        yield refusal("launcher", message, f"{install_command('resiliency')}, there")


CHECKS: tuple[Callable[[JobCheck], Findings], ...] = (
    checks.nodes,
    checks.limits,
    checks.memory,
    checks.traced,
    checks.data,
    checks.storage,
    checks.time,
    checks.signal,
    checks.purpose,
    resources,
    traps,
    internet,
    accepted,
    owned,
    edited,
    installed,
)
