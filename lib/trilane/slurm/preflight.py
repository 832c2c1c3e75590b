"""The pre-flight check of a job: what would fail or waste GPU hours, each finding with its rule and its remedy."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from trilane.config.plan import Plan
from trilane.costmodel.calibration import Calibration
from trilane.slurm import checks, client
from trilane.slurm.checks import REFUSAL, WARNING, JobCheck, Row
from trilane.slurm.copies import USED_BY
from trilane.slurm.script import SCRIPT, gres_gpus, render
from trilane.slurm.sites import JobRequest, Site, seconds_of
from trilane.utils.tables import DataFrame, Table, frame_of
from trilane.utils.validation import read_text, require_known

# Every rule of the check, as --allow takes them; an impossible value is refused under its own field's name.
NAMES = (
    *("engine", "cluster", "nodes", "tp", "precision", "wheel", "qos", "qos time", "qos gpus", "account", "memory"),
    *("host memory", "time", "checkpoints", "site", "script", "spares", "kill-on-bad-exit", "pipefail", "signal"),
    *("error file", "port", "code", "internet", "container", "bash", "sbatch", "data", "corpus", "shared", "tokens"),
    *("epochs", "learning rate", "disk", "inodes", "run folder", "checkpoint"),
)
# what is read off the machine on which the check runs, which must then be the cluster's
OF_MACHINE = ("sbatch", "wheel", "data", "corpus", "container", "shared", "disk", "inodes")
REMEDIES = {
    "gbs": "choose a global batch size that mbs x dp divides, or fewer replicas",
    "ramp": "choose start, increment and gbs that mbs x dp divides at every step, or fewer replicas in the first links",
    "tp x pp x dp": "choose tp, pp and dp whose product fills whole nodes and is not more than the cluster has",
    "tp": "choose a tensor-parallel size that divides heads, hidden size and vocabulary",
    "pp": "choose a pipeline depth that divides the layers, or another partition",
    "precision": "use fp16 (a V100 has no bf16), or cards that have it",
}


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


class Findings(list[JobFinding], Table):
    """The findings about one job, refusals first."""

    def to_frame(self) -> DataFrame:
        return frame_of(self, {name: name for name in ("level", "rule", "message", "remedy")})


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

    `calibration` has the constants that predicted the plan, where other than the cluster's. It reads `script`, else the
    folder's job.sbatch, else the script that would be written.
    """
    for name in allow:
        require_known("allow", name, {*NAMES, *REMEDIES, *(f.name for f in fields(JobRequest))})
    path = script or folder / SCRIPT
    try:
        is_written = script is not None or path.exists()
        text = read_text(path, "script", 1 << 20) if is_written else render("train", plan, site, request)
    except ValueError as error:
        return Findings([of_error(error)])
    case = JobCheck(plan, site, request, folder, text, path.name, calibration)
    found = [finding for check in CHECKS for finding in _findings(check, case)]
    # what SLURM's commands say without a slurm.conf
    is_unconfigured = any("establish a configuration source" in f.message for f in found)
    if not site.is_local and (not client.is_installed() or is_unconfigured):
        found = _off_cluster(found)
    found = [replace(f, level=WARNING) if f.rule in allow else f for f in dict.fromkeys(found)]
    return Findings(sorted(found, key=lambda f: f.level != REFUSAL))


def _findings(check: Callable[[JobCheck], list[Row]], case: JobCheck) -> Iterator[JobFinding]:
    try:
        for is_wrong, rule, level, message, remedy in check(case):
            if is_wrong:
                yield JobFinding(level=level, rule=rule, message=message, remedy=remedy)
    except ValueError as error:  # an #SBATCH line edited by hand
        yield of_error(error)


def _off_cluster(found: Collection[JobFinding]) -> list[JobFinding]:
    """The findings, those about a machine that is not the cluster in one: it says nothing about the cluster's."""
    about = ", ".join(dict.fromkeys(f.rule for f in found if f.rule in OF_MACHINE[1:]))
    message = "this machine is not the cluster (sbatch is not installed, or not configured): SLURM was not asked"
    message += f"; what this machine lacks ({about}) the cluster may have" if about else ""
    one = JobFinding(level=WARNING, rule="sbatch", message=message, remedy="run the check on a login node")
    return [*(f for f in found if f.rule not in OF_MACHINE), one]


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


def _starts_ranks(case: JobCheck) -> bool:
    """Whether srun starts the ranks directly, one task each."""
    return re.search(r"^[^#\n]*(srun [^\n]*|exec python )-m trilane\.engine ", case.script, re.M) is not None


def resources(case: JobCheck) -> list[Row]:
    """Nodes, tasks, processes and GPUs of the script are those of the plan, and it asks for what it needs: otherwise
    sbatch gives one node, a core, no GPU, or nodes of another kind."""
    asked, every, used, site = case.directives, case.plan.topology.gpus, case.gpus_per_node, case.site
    tasks, nodes = used if _starts_ranks(case) else 1, case.nodes + case.spares
    wanted = {"nodes": str(nodes), "ntasks-per-node": str(tasks), "ntasks": str(nodes * tasks)}
    is_cuda = case.cluster.gpu.kind == "cuda"
    wanted |= {"gres": f"gpu:{used}", "gpus-per-node": str(used)} if is_cuda else {}
    rows: list[Row] = []
    for name, value in wanted.items():
        is_other = name in asked and not _same(name, asked[name], value)
        text = f"--{name}={asked.get(name)}: the plan's {every} GPUs need {value}"
        rows.append((is_other, "script", REFUSAL, text, "correct the script, or the plan"))
    started = re.search(r"--nproc-per-node=(\d+)", case.script)
    processes = int(started[1]) if started else used
    many = f"{processes} processes per node: the plan's {every} GPUs need {used}"
    array = re.search(r"%[Aa]", asked.get("output", "")) and "array" not in asked
    rows += [
        (processes != used, "script", REFUSAL, many, "change --nproc-per-node"),
        (array, "script", WARNING, "%A and %a are 4294967294 outside of an array", "use %j"),
    ]
    lacks = lambda *names: not site.is_local and not any(name in asked for name in names)  # noqa: E731
    no_gpu = lacks("gpus-per-node", "gpus", "gpus-per-task") and not gres_gpus(asked.get("gres", ""))
    missing = (
        (is_cuda and no_gpu, REFUSAL, f"no GPU is asked for: --gres=gpu:{used} is missing"),
        (nodes > 1 and lacks("nodes"), REFUSAL, f"--nodes={nodes} is missing: sbatch would choose their number"),
        (
            *(tasks > 1 and lacks("ntasks", "ntasks-per-node"), REFUSAL),
            f"--ntasks-per-node={tasks} is missing: srun would start one rank a node",
        ),
        (
            *(site.nodes_wanted and lacks("constraint", "partition", "nodelist"), REFUSAL),
            f"--constraint={site.nodes_wanted} is missing: the job may get nodes of another kind",
        ),
        (
            *(lacks("cpus-per-task", "cpus-per-gpu", "exclusive"), WARNING),
            "--cpus-per-task is missing: each task gets one core",
        ),
    )
    return rows + [(wrong, "script", level, text, rewrite_remedy(case)) for wrong, level, text in missing]


def _same(name: str, current: str, value: str) -> bool:
    """Whether two values of a directive mean the same."""
    if name == "time" and current:
        return seconds_of(current) == seconds_of(value)
    if name in ("gres", "gpus-per-node"):
        head = "" if name == "gres" else "gpu:"
        return gres_gpus(head + current) == gres_gpus(head + value)
    return current in (value, f"{value}-{value}" if name == "nodes" else value)


def requested(case: JobCheck) -> list[Row]:
    """The options requested now are those of the script, which may have been written earlier; what spares cost."""
    k, n, used, remedy, rows = case.spares, case.nodes, case.gpus_per_node, rewrite_remedy(case), list[Row]()
    names = {name: name for name in ("account", "qos", "partition", "constraint", "reservation", "exclude", "spares")}
    for option, name in (names | {"time_limit": "time", "mail": "mail-user"}).items():
        value = str(getattr(case.request, option))
        current = str(k or "") if name == "spares" else case.directives.get(name, "")
        is_other = option in case.request.given() and not _same(name, current, value)
        text = f"--{name} {value} is requested, {case.name} has {current or 'none'}"
        rows.append((is_other, "script", REFUSAL, text, remedy))
    most, hours = case.cluster.max_nodes, case.limit_s / 3600
    share = f"{k * used * hours:,.0f} of the {(n + k) * used * hours:,.0f} GPU-hours of this job"
    share = share if hours < float("inf") else f"{k * used} of the {(n + k) * used} GPUs of this job, without a limit,"
    few = f"{k} spare nodes: {case.cluster.name} has {most} nodes, and the plan trains on {n}"
    worth = "worth it where a place in the queue costs more than that: a node's failure then costs no requeue"
    return [
        *rows,
        (k and n + k > most, "spares", REFUSAL, few, f"ask for at most {max(0, most - n)}"),
        (0 < k <= most - n, "spares", WARNING, f"{k} of {n + k} nodes stand by: {share} are for them", worth),
    ]


def rewrite_remedy(case: JobCheck) -> str:
    """How to bring the script to the requested options."""
    if case.name == SCRIPT:
        return f"edit {case.folder / SCRIPT}, or write it again with `trilane slurm submit --rewrite --dry-run`"
    return f"edit {case.name}, or create the sweep again in another folder"


def traps(case: JobCheck) -> list[Row]:
    """Nothing keeps a failed job running, hides its failure, or makes two jobs collide; signals reach the ranks."""
    has = lambda pattern: re.search(pattern, case.script, re.M)  # noqa: E731
    waits = "srun without --kill-on-bad-exit=1: when one node fails, the others wait until the time limit"
    hides = "a pipe into tee without pipefail: a failed run counts as COMPLETED, and dependent jobs start"
    shared = "one TORCHELASTIC_ERROR_FILE for all nodes: the launchers overwrite each other's report"
    # our torchrun; a shell with a trap of its own
    handles = has(r"""^[^#\n]*(trilane\.engine\.torchrun|trap ["'][^"'\n]+["'] USR1)""") or _starts_ranks(case)
    lost = "SIGUSR1 before the limit may reach only the launcher, which ignores it or ends: nothing is saved"
    forward = "python -m trilane.engine.torchrun forwards it; or trap 'touch save' USR1"
    old = "runs the code that is installed when the job starts, not the one that was submitted: an older script"
    free_port = "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))"
    return [
        (
            *(has("srun") and not has("--kill-on-bad-exit=1"), "kill-on-bad-exit", REFUSAL, waits),
            "srun --kill-on-bad-exit=1 --wait=60 ...",
        ),
        (has(r"\| tee") and not has("pipefail"), "pipefail", REFUSAL, hides, "set -euo pipefail"),
        (
            *(has(r"TORCHELASTIC_ERROR_FILE=(?!.*(NODEID|HOSTNAME|PROCID))"), "error file", WARNING, shared),
            "put $SLURM_NODEID into its name",
        ),
        (has(r"MASTER_PORT=\d+\b"), "port", WARNING, "a fixed MASTER_PORT: two jobs on one node collide", free_port),
        ("signal" in case.directives and not handles, "signal", REFUSAL, lost, forward),
        (has("python -m trilane") and not has(USED_BY), "code", WARNING, old, rewrite_remedy(case)),
    ]


def internet(case: JobCheck) -> list[Row]:
    """Nothing needs the internet where compute nodes have none."""
    tokenizer, name, offline = case.plan.data.tokenizer, case.site.name, case.site.offline
    words = r"^[^#\n]*\b(?:pip3? install|conda install|git clone|wget|curl|huggingface-cli download|apt)\b"
    found = re.search(words, case.script, re.M)
    loads = f"compute nodes of {name} have no internet, and the script has: {found[0].strip() if found else ''}"
    waits = "without HF_HUB_OFFLINE=1 Hugging Face libraries wait minutes for a connection that cannot be made"
    export = "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1"
    is_remote, remote = tokenizer != "bytes" and not Path(tokenizer).is_dir(), f"tokenizer {tokenizer} is not a folder"
    return [
        (is_remote, "internet", REFUSAL, f"{remote} here", "download it first, and name its folder"),
        (offline and found, "internet", REFUSAL, loads, "do it once on a login node"),
        (offline and "HF_HUB_OFFLINE=1" not in case.script, "internet", WARNING, waits, export),
    ]


def container(case: JobCheck) -> list[Row]:
    """The site's image exists, and a container that mounts nothing by itself sees the corpus."""
    site, image, data = case.site, case.site.image_file, case.plan.data
    lacks, text = image and not Path(image).exists(), f"container_image={image}: no such file"
    rows: list[Row] = [(lacks, "container", REFUSAL, text, "pull or build the image, or correct the site's file")]
    seen = [case.folder.resolve(), *(Path(mount.split(":")[0]) for mount in site.container_mounts)]
    for name, path in {"data.folder": data.folder, "data.source": data.source}.items():
        place, is_file = Path(path).resolve(), name == "data.folder" or "/" in path
        hidden = site.container == "pyxis" and is_file and not any(map(place.is_relative_to, seen))
        text = f"{name}={place} is in none of container_mounts, and pyxis mounts only those"
        add = f'add "{place}" to container_mounts, unless the cluster mounts it'
        rows.append((hidden, "container", WARNING, text, add))
    return rows


def accepted(case: JobCheck) -> list[Row]:
    """bash can parse the script, and each line of the site's setup; `sbatch --test-only` accepts it: partition,
    constraint, account, QoS, node and GPU counts, the array's indices."""
    lines = {f"site.setup, line {number}": line for number, line in enumerate(case.site.setup, 1)}
    rows = list[Row]()
    for name, text in ({"script": case.script} | lines).items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        says = f"{name}: {(done.stderr.strip().splitlines() or [''])[0]}"
        rows.append((done.returncode, "bash", REFUSAL, says, "correct it"))
    if case.site.is_local:
        return rows
    if case.slurm_problem:
        remedy = "check again when it answers; SLURM answers on a login node"
        return [*rows, (True, "sbatch", REFUSAL, case.slurm_problem, remedy)]
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(case.script)
        file.flush()
        try:
            client.test_only(Path(file.name))
        except client.SlurmError as error:
            remedy = "sinfo lists the partitions, sacctmgr show assoc the accounts and QoS that you may use"
            rows.append((True, "sbatch", REFUSAL, str(error), remedy))
    return rows


CHECKS = (
    *(checks.nodes, checks.wheel, checks.limits, checks.memory, checks.data, checks.storage, checks.time),
    *(checks.warning, checks.purpose, resources, requested, traps, internet, container, accepted),
)
