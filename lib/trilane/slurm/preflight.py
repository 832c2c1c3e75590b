"""The pre-flight check of a job: what would fail or waste GPU hours, each finding with its rule and
its remedy.
"""

import contextlib
import difflib
import grp
import os
import platform
import pwd
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from importlib.metadata import distributions
from pathlib import Path

from trilane.config.engines import installed_version, version_misfit
from trilane.config.plan import Plan
from trilane.slurm import checks, client, copies, ledger
from trilane.slurm.checks import REFUSAL, WARNING, JobCheck, Row
from trilane.slurm.script import SCRIPT, gres_gpus, render
from trilane.slurm.sites import JobRequest, Site, seconds_of
from trilane.utils.process import imports_triton, install_command, run
from trilane.utils.validation import read_text, require_known
from trilane.workspace.installation import checkout
from trilane.workspace.prepared_corpora import existing_pair

# Every rule of the check, as --allow takes them; an impossible value is refused under its own
# field's name.
NAMES = (
    *(
        "engine",
        "cluster",
        "nodes",
        "tp",
        "precision",
        "qos time",
        "qos gpus",
        "account",
        "memory",
        "trace",
    ),
    *(
        "host memory",
        "time",
        "checkpoints",
        "script",
        "changes",
        "owner",
        "kill-on-bad-exit",
        "pipefail",
        "signal",
    ),
    *("internet", "launcher", "container", "bash", "sbatch", "data", "corpus", "shared", "tokens"),
    *("epochs", "disk", "inodes", "run folder", "checkpoint", "gbs", "ramp", "tp x pp x dp", "pp"),
)


@dataclass(frozen=True, kw_only=True)
class JobFinding:
    """One problem of a job, certain (a refusal) or likely (a warning), with its remedy."""

    level: str
    rule: str
    message: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The JSON object of `trilane slurm check`; the key of the message is `says`."""
        return {"level": self.level, "rule": self.rule, "says": self.message, "remedy": self.remedy}


def check_job(
    plan: Plan, site: Site, request: JobRequest, folder: Path, allow: Collection[str] = ()
) -> list[JobFinding]:
    """Every finding about the run in `folder`, refusals first; the rules in `allow` only warn.

    It reads the folder's job.sbatch, else the script that would be written.
    """
    for name in allow:
        require_known("allow", name, {*NAMES, *(f.name for f in fields(JobRequest))})
    path = folder / SCRIPT
    try:
        text = (
            read_text(path, "script", 1 << 20)
            if path.exists()
            else render("train", plan, site, request)
        )
    except ValueError as error:
        return [of_error(error)]
    case = JobCheck(plan, site, request, folder, text)
    found = [finding for check in CHECKS for finding in _findings(check, case)]
    # what SLURM's commands say without a slurm.conf
    is_unconfigured = any("establish a configuration source" in f.message for f in found)
    if not site.is_local and (not client.is_installed() or is_unconfigured):
        found = _off_cluster(found)
    found = [replace(f, level=WARNING) if f.rule in allow else f for f in dict.fromkeys(found)]
    return sorted(found, key=lambda f: f.level != REFUSAL)


def _findings(check: Callable[[JobCheck], list[Row]], case: JobCheck) -> Iterator[JobFinding]:
    try:
        for is_wrong, rule, level, message, remedy in check(case):
            if is_wrong:
                yield JobFinding(level=level, rule=rule, message=message, remedy=remedy)
    except ValueError as error:  # an #SBATCH line edited by hand
        yield of_error(error)


def _off_cluster(found: Collection[JobFinding]) -> list[JobFinding]:
    """The findings, those about a machine that is not the cluster in one: it says nothing about the
    cluster's.
    """
    local = ("data", "corpus", "container", "shared", "disk", "inodes")
    about = ", ".join(dict.fromkeys(f.rule for f in found if f.rule in local))
    message = "this machine is not the cluster (sbatch is not installed, or not configured): SLURM was not asked"
    message += f"; what this machine lacks ({about}) the cluster may have" if about else ""
    one = JobFinding(
        level=WARNING, rule="sbatch", message=message, remedy="run the check on a login node"
    )
    return [*(f for f in found if f.rule not in (*local, "sbatch")), one]


def of_error(error: ValueError) -> JobFinding:
    """A ValueError of the form "field=value: the rule" as a refusal."""
    field = str(error).partition("=")[0]
    remedy = "correct it in the plan, the script, the request or the site's file"
    return JobFinding(level=REFUSAL, rule=field, message=str(error), remedy=remedy)


def refused(findings: Collection[JobFinding]) -> list[JobFinding]:
    """The refusals among them."""
    return [f for f in findings if f.level == REFUSAL]


def line(finding: JobFinding) -> str:
    """A finding as two lines of text."""
    return f"{finding.level:7} [{finding.rule}] {finding.message}\n        {finding.remedy}"


def _starts_ranks(case: JobCheck) -> bool:
    """Whether srun starts the ranks directly, one task each."""
    return (
        re.search(r"^[^#\n]*(srun [^\n]*|exec python )-m trilane_engine ", case.script, re.M)
        is not None
    )


def resources(case: JobCheck) -> list[Row]:
    """The script, which may have been written earlier or edited, asks for what the plan needs and
    for the options that are given now: what it lacks, sbatch would choose.
    """
    asked, used, k, given, rows = (
        case.directives,
        case.gpus_per_node,
        case.spares,
        case.request.given(),
        list[Row](),
    )
    gpus, tasks = case.plan.topology.gpus, used if _starts_ranks(case) else 1
    nodes = case.nodes + (case.request.spares if "spares" in given else k)
    remedy = f"edit {SCRIPT}, or write it again: `trilane slurm submit --rewrite --dry-run`"
    # options of which one must be there, its value ("": any), and whether it is needed
    wanted = [
        (("nodes",), str(nodes), nodes > 1),
        (("ntasks-per-node", "ntasks"), str(tasks), tasks > 1),
        (("gres", "gpus-per-node"), f"gpu:{used}", case.cluster.gpu.kind == "cuda"),
        (("cpus-per-task", "cpus-per-gpu", "exclusive"), "", True),
        (("constraint", "partition", "nodelist"), "", bool(case.site.constraint)),
    ]
    options = (
        "account",
        "qos",
        "partition",
        "constraint",
        "reservation",
        "exclude",
        "time_limit",
        "mail",
    )
    names = {"time_limit": "time", "mail": "mail-user"}
    wanted += [
        ((names.get(o, o),), str(getattr(case.request, o)), True) for o in options if o in given
    ]
    for own, value, is_needed in [] if case.site.is_local else wanted:
        has = {name: asked[name] for name in own if name in asked}
        differs = bool(value) and not all(
            _same(name, text, value, nodes) for name, text in has.items()
        )
        needed, shown = (
            f"--{own[0]}={value or '...'}",
            ", ".join(f"--{name}={text}" for name, text in has.items()),
        )
        text = f"{needed} is needed (for {gpus} GPUs and the options given), {SCRIPT} has {shown or 'none'}"
        rows.append((differs if has else is_needed, "script", REFUSAL, text, remedy))
    started = re.search(r"--nproc-per-node=(\d+)", case.script)
    processes = int(started[1]) if started else used
    text = f"{processes} processes per node: the plan's {gpus} GPUs need {used}"
    rows.append((processes != used, "script", REFUSAL, text, remedy))
    return rows


def _same(name: str, current: str, value: str, nodes: int) -> bool:
    """Whether an option of the script means that value."""
    if name == "time" and current:
        return seconds_of(current) == seconds_of(value)
    if name in ("gres", "gpus-per-node"):
        return gres_gpus(current if name == "gres" else f"gpu:{current}") == gres_gpus(value)
    if name == "ntasks":
        return current == str(nodes * int(value))
    return current in (value, f"{value}-{value}" if name == "nodes" else value)


def traps(case: JobCheck) -> list[Row]:
    """Nothing keeps a failed job running, or hides its failure; signals reach the ranks."""
    has = lambda pattern: re.search(pattern, case.script, re.M)  # noqa: E731
    waits = "srun without --kill-on-bad-exit=1: when one node fails, the others wait until the time limit"
    hides = "a pipe into tee without pipefail: a failed run counts as COMPLETED, and dependent jobs start"
    lost = "SIGUSR1 before the limit may reach only the launcher, which ignores it or ends: nothing is saved"
    # our torchrun; a shell with a trap of its own
    handles = has(
        r"""^[^#\n]*(trilane_engine\.torchrun|trap ["'][^"'\n]+["'] USR1)"""
    ) or _starts_ranks(case)
    keeps, never = (
        "srun --kill-on-bad-exit=1 --wait=15 ...",
        has("srun") and not has("--kill-on-bad-exit=1"),
    )
    forward = "python -m trilane_engine.torchrun forwards it; or trap 'touch save' USR1"
    return [
        (never, "kill-on-bad-exit", REFUSAL, waits, keeps),
        (has(r"\| tee") and not has("pipefail"), "pipefail", REFUSAL, hides, "set -euo pipefail"),
        ("signal" in case.directives and not handles, "signal", REFUSAL, lost, forward),
    ]


def internet(case: JobCheck) -> list[Row]:
    """Nothing needs the internet where compute nodes have none."""
    tokenizer, offline = case.plan.data.tokenizer, case.site.offline
    waits = "without HF_HUB_OFFLINE=1 Hugging Face libraries wait minutes for a connection that cannot be made"
    export = "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1"
    texts = [
        part for part in case.plan.data.parts if not existing_pair(str(case.folder / part.source))
    ]
    is_remote, remote = (
        tokenizer != "bytes" and not Path(tokenizer).is_dir(),
        f"tokenizer {tokenizer} is not a folder",
    )
    return [
        (
            texts and is_remote,
            "internet",
            REFUSAL,
            f"{remote} here",
            "download it first, and name its folder",
        ),
        (offline and "HF_HUB_OFFLINE=1" not in case.script, "internet", WARNING, waits, export),
    ]


def accepted(case: JobCheck) -> list[Row]:
    """The container's image exists, bash can parse the script, and `sbatch --test-only` accepts it:
    partition, constraint, account, QoS, node and GPU counts.
    """
    image = case.site.image_file
    lacks, text = image and not Path(image).exists(), f"container_image={image}: no such file"
    rows: list[Row] = [
        (lacks, "container", REFUSAL, text, "pull or build the image, or correct the site's file")
    ]
    done = run(["bash", "-n"], input=case.script)
    rows.append(
        (
            done.returncode,
            "bash",
            REFUSAL,
            f"script: {done.stderr.strip().partition(chr(10))[0]}",
            "correct it",
        )
    )
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(case.script)
        file.flush()
        try:
            client.require_answer()
            _ = case.site.is_local or client.test_only(Path(file.name))
        except ValueError as error:
            remedy = "sinfo lists the partitions, sacctmgr show assoc the accounts and QoS that you may use"
            rows.append((not case.site.is_local, "sbatch", REFUSAL, str(error), remedy))
    return rows


def owned(case: JobCheck) -> list[Row]:
    """Nobody else decides what the job runs: whoever may write to the run folder may replace what
    is in it.

    Left out: access lists, and the folders above.
    """
    paths = {
        "script": case.folder / SCRIPT,
        "plan": case.folder / "plan.json",
        "run folder": case.folder,
    }
    remedy = (
        "read it, and copy what you want to a run folder of your own; or `chmod go-w` what is yours"
    )
    found = [(name, path, _foreign(path.stat())) for name, path in paths.items() if path.exists()]
    return [
        (
            why and not case.site.is_local,
            "owner",
            REFUSAL,
            f"{name}={path}: {why}; a job runs it in your name",
            remedy,
        )
        for name, path, why in found
    ]


def _foreign(stat: os.stat_result) -> str:
    """Who else may change a file; "" where only this user and root may."""
    if stat.st_uid not in (os.geteuid(), 0):
        with contextlib.suppress(KeyError):
            return f"belongs to user {pwd.getpwuid(stat.st_uid).pw_name}"
        return f"belongs to user {stat.st_uid}"
    is_private = False
    with contextlib.suppress(KeyError):
        # some systems give each user a group of that name, and umask 002
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(stat.st_gid)
        is_private = me.pw_name == group.gr_name and not {*group.gr_mem} - {me.pw_name}
    return "is writable by others" if stat.st_mode & (0o002 if is_private else 0o022) else ""


def edited(case: JobCheck) -> list[Row]:
    """The commands of job.sbatch are those that plan, site and options render; the difference is
    shown, and that of the plan since its submission.
    """
    before = [e for e in ledger.events(case.folder, "submitted") if e.get("plan")]
    rows, wanted = list[Row](), case.script
    with contextlib.suppress(ValueError):  # a plan that has no script is refused by another rule
        spares = case.request.spares or case.spares
        wanted = render("train", case.plan, case.site, replace(case.request, spares=spares))
    # lines as bash has them: a carriage return or U+2028 before a # would pass what follows as a
    # comment
    path = case.folder / SCRIPT
    own = path.read_bytes().decode("utf-8-sig", "replace") if path.exists() else case.script
    both = (wanted.split("\n"), own.split("\n"))
    lines = [*difflib.unified_diff(*both, "rendered", SCRIPT, n=0, lineterm="")]
    # options are other rules', but for files and variables (by their beginnings); a quote in a
    # comment may end a text
    option = r"#SBATCH.*\s-([A-Za-z]*[ioeD]|-in|-ou|-er|-exp|-ch|-ge)"
    command = re.compile(rf"[+-](\s*(#!|[^\s#])|.*[\"'`\\]|{option})")
    is_command = any(
        command.match(line) or not line.replace("\t", " ").isprintable() for line in lines[2:]
    )
    more = [f"... {len(lines) - 20} lines more"] * (len(lines) > 20)
    text = "\n".join(
        [
            f"script={SCRIPT}: is not what plan, site and options render",
            *(line[:160] for line in lines[:20]),
            *more,
        ]
    )
    remedy = "give the options it was written with, or --rewrite, or --accept-changes"
    is_shown = bool(lines) and not case.site.is_local
    rows.append((is_shown, "changes", REFUSAL if is_command else WARNING, text, remedy))
    with contextlib.suppress(ValueError):
        changes = copies.plan_changes(case.folder, before[-1]["plan"]) if before else []
        text = "\n".join(["plan.json has changed since it was last submitted:", *changes])
        rows.append((changes, "changes", WARNING, text, "a submission takes it as it is"))
    return rows


def installed(case: JobCheck) -> list[Row]:
    """What the job's environment has beside megatron-core, where it is a folder that can be seen
    here.

    Left out: containers, and an environment that takes packages of its system, which a module may
    bring on the nodes.
    """
    folder = Path(case.request.environment or checkout() or sys.prefix)
    folder = folder / ".venv" if not case.request.environment and checkout() else folder
    packages = [str(place) for place in folder.glob("lib/python3*/site-packages")]
    settings = folder / "pyvenv.cfg"
    is_open = settings.is_file() and "include-system-site-packages = true" in settings.read_text(
        errors="replace"
    )
    if case.site.container or not packages or is_open:
        return []
    return [
        *triton(folder, packages),
        *transformer_engine(case, packages),
        *resiliency(case, folder, packages),
    ]


def triton(folder: Path, packages: list[str]) -> list[Row]:
    """megatron-core imports it from 0.18 on and does not require it: each rank would end in a
    traceback.
    """
    core = installed_version("megatron-core", packages)
    lacks = imports_triton(core) and not installed_version("triton", packages)
    text = f"triton=missing: megatron-core {core} in {folder} imports it"
    return [(lacks, "launcher", REFUSAL, text, "pip install triton, there")]


def transformer_engine(case: JobCheck, packages: list[str]) -> list[Row]:
    """A plan that asks for Transformer Engine finds a release there that goes with megatron-core."""
    topology = case.plan.topology
    is_asked = topology.precision == "fp8" or topology.overlap_tp or case.plan.run.fused == "te"
    misfit = version_misfit("transformer-engine[pytorch]", packages)
    return [(is_asked and misfit, "engine", REFUSAL, misfit, "in the job's environment")]


def resiliency(case: JobCheck, folder: Path, packages: list[str]) -> list[Row]:
    """nvidia-resiliency-ext: ft_launcher needs it, megatron-core may fail beside it, and its wheels
    from 0.5 on are for glibc 2.39 (pip takes 0.4.1 without it).
    """
    name = "nvidia-resiliency-ext"
    found = next(iter(distributions(name=name, path=packages)), None)
    starts = "--ft-" in case.script
    if not found:
        text, remedy = (
            f"launcher=ft_launcher: needs {name} in {folder}",
            f"{install_command('resiliency')}, there",
        )
        return [(starts, "launcher", REFUSAL, text, remedy)]
    # the tag of PEP 600; a wheel for a newer glibc comes from another machine, as its Python may
    wanted = max(
        map(int, re.findall(r"manylinux_2_(\d+)", found.read_text("WHEEL") or "")), default=0
    )
    libc, version = platform.libc_ver()
    here = int(version.split(".")[1]) if libc == "glibc" else wanted
    text = f"{name}={found.version}: {folder} has its wheel for glibc 2.{wanted}, this machine has 2.{here}"
    misfit = version_misfit(name, packages)
    remedy = (
        f"from 0.5 on it needs glibc 2.39 (here: 2.{here}); uninstalled, --launcher torchrun trains"
    )
    return [
        (misfit, "launcher", REFUSAL, misfit, remedy),
        (
            starts and here < wanted,
            "launcher",
            WARNING,
            text,
            "install it on this machine, or use a container",
        ),
    ]


CHECKS = (
    *(
        checks.nodes,
        checks.limits,
        checks.memory,
        checks.traced,
        checks.data,
        checks.storage,
        checks.time,
    ),
    *(checks.interval, checks.warning, checks.purpose, resources, traps, internet, accepted),
    *(owned, edited, installed),
)
