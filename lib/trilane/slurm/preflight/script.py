"""Pre-flight checks of the script, which may be edited by hand: known traps, and what sbatch itself refuses."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trilane.slurm import client
from trilane.slurm.copies import USED_BY
from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, refuse, warn
from trilane.slurm.script import SCRIPT, gres_gpus
from trilane.slurm.site_options import image_file
from trilane.slurm.sites import seconds_of

DIRECTIVES = ("account", "time", "qos", "partition", "constraint", "reservation", "exclude", "mail-user")

DOWNLOADS = re.compile(
    r"^[^#\n]*\b(?:pip3? install|conda install|git clone|wget|curl|huggingface-cli download|apt)\b", re.M
)

# Ranks that srun starts directly, one task each.
RANK_EACH = re.compile(r"^[^#\n]*(srun [^\n]*|exec python )-m trilane\.engine ", re.M)
# Our torchrun; a shell with a trap of its own.
HANDLES_SIGNAL = re.compile(r"""^[^#\n]*(trilane\.engine\.torchrun|trap ["'][^"'\n]+["'] USR1)""", re.M)


def directives(case: JobCheck) -> Iterator[JobFinding]:
    """Nodes, tasks, processes and GPUs of the script are those of the plan."""
    asked, every = case.directives, case.plan.topology.gpus
    used = min(every, case.cluster.gpus_per_node)
    tasks = used if RANK_EACH.search(case.script) else 1
    wanted = {"nodes": str(case.nodes + case.spares), "ntasks-per-node": str(tasks)}
    if case.cluster.gpu.kind == "cuda":
        wanted |= {"gres": f"gpu:{used}", "gpus-per-node": str(used)}
    for name, value in wanted.items():
        if name in asked and not _same(name, asked[name], value):
            message = f"--{name}={asked[name]}: the plan's {every} GPUs need {value}"
            yield refuse("script", message, "correct the script, or the plan")
    started = re.search(r"--nproc-per-node=(\d+)", case.script)
    if started and int(started[1]) != used:
        message = f"{started[1]} processes per node: the plan's {every} GPUs need {used}"
        yield refuse("script", message, "change --nproc-per-node")
    if "array" not in asked and re.search(r"%[Aa]", asked.get("output", "")):
        yield warn("script", "%A and %a are 4294967294 outside of a job array", "use %j")


def lacking(case: JobCheck) -> Iterator[JobFinding]:
    """The script asks for what it needs: otherwise sbatch gives one node, a core, no GPU, or nodes of another kind."""
    asked, site = case.directives, case.site
    if site.is_local:
        return
    tasks = case.gpus_per_node if RANK_EACH.search(case.script) else 1
    nodes, gpus = case.nodes + case.spares, {"gpus-per-node", "gpus", "gpus-per-task"}
    remedy = "add the line, or write the script again with `trilane slurm submit --rewrite --dry-run`"
    if case.cluster.gpu.kind == "cuda" and not gpus & set(asked) and not gres_gpus(asked.get("gres", "")):
        yield refuse("script", f"no GPU is asked for: --gres=gpu:{case.gpus_per_node} is missing", remedy)
    if nodes > 1 and "nodes" not in asked:
        yield refuse("script", f"--nodes={nodes} is missing: sbatch would choose their number", remedy)
    if asked.get("ntasks", str(nodes * tasks)) != str(nodes * tasks):
        yield refuse("script", f"--ntasks={asked['ntasks']}: {nodes} nodes need {nodes * tasks}", "correct the script")
    elif tasks > 1 and not {"ntasks", "ntasks-per-node"} & set(asked):
        yield refuse("script", f"--ntasks-per-node={tasks} is missing: srun would start one rank a node", remedy)
    if site.nodes_wanted and not {"constraint", "partition", "nodelist"} & set(asked):
        message = f"--constraint={site.nodes_wanted} is missing: the job may get nodes of another kind"
        yield refuse("script", message, remedy)
    if not {"cpus-per-task", "cpus-per-gpu", "exclusive"} & set(asked):
        yield warn("script", "--cpus-per-task is missing: each task gets one core", remedy)


def requested(case: JobCheck) -> Iterator[JobFinding]:
    """The options requested now are those of the script, which may have been written earlier."""
    if case.request.spares not in (0, case.spares):
        message = f"--spares {case.request.spares} is requested, {case.name} has {case.spares or 'none'}"
        yield refuse("script", message, rewrite_remedy(case))
    for option in case.request.given():
        name, value = {"time_limit": "time", "mail": "mail-user"}.get(option, option), getattr(case.request, option)
        current = case.directives.get(name, "")
        if name in DIRECTIVES and not _same(name, current, value):
            message = f"--{name} {value} is requested, {case.name} has {current or 'none'}"
            yield refuse("script", message, rewrite_remedy(case))


def _same(name: str, current: str, value: str) -> bool:
    """Whether two values of a directive mean the same."""
    if name == "time" and current:
        return seconds_of(current) == seconds_of(value)
    if name in ("gres", "gpus-per-node"):
        head = "" if name == "gres" else "gpu:"
        return gres_gpus(head + current) == gres_gpus(head + value)
    return current in (value, f"{value}-{value}" if name == "nodes" else value)


def rewrite_remedy(case: JobCheck) -> str:
    """How to bring the script to the requested options."""
    if case.name == SCRIPT:
        return f"edit {case.folder / SCRIPT}, or write it again with `trilane slurm submit --rewrite --dry-run`"
    return f"edit {case.name}, or create the sweep again in another folder"


def spares(case: JobCheck) -> Iterator[JobFinding]:
    """The nodes that stand by are there, and what they cost."""
    k, n, most = case.spares, case.nodes, case.cluster.max_nodes
    if k and n + k > most:
        message = f"{k} spare nodes: {case.cluster.name} has {most} nodes, and the plan trains on {n}"
        yield refuse("spares", message, f"ask for at most {max(0, most - n)}")
    elif k:
        used, hours = case.gpus_per_node, seconds_of(case.directives.get("time", "00:10:00")) / 3600
        cost = f"{k * used * hours:,.0f} of the {(n + k) * used * hours:,.0f} GPU-hours of this job"
        cost = (
            cost if hours < float("inf") else f"{k * used} of the {(n + k) * used} GPUs of this job, without a limit,"
        )
        message = f"{k} of {n + k} nodes stand by: {cost} are for them"
        remedy = "worth it where a place in the queue costs more than that: a node's failure then costs no requeue"
        yield warn("spares", message, remedy)


def dead_ends(case: JobCheck) -> Iterator[JobFinding]:
    """Nothing keeps a failed job running, hides its failure, or makes two jobs collide."""
    text = case.script
    if "srun" in text and "--kill-on-bad-exit=1" not in text:
        message = "srun without --kill-on-bad-exit=1: when one node fails, the others wait until the time limit"
        yield refuse("kill-on-bad-exit", message, "srun --kill-on-bad-exit=1 --wait=60 ...")
    if "| tee" in text and "pipefail" not in text:
        message = "a pipe into tee without pipefail: a failed run counts as COMPLETED, and dependent jobs start"
        yield refuse("pipefail", message, "set -euo pipefail")
    if "signal" in case.directives and not (HANDLES_SIGNAL.search(text) or RANK_EACH.search(text)):
        message = "SIGUSR1 before the limit may reach only the launcher, which ignores it or ends: nothing is saved"
        yield refuse("signal", message, "python -m trilane.engine.torchrun forwards it; or trap 'touch save' USR1")
    if re.search(r"TORCHELASTIC_ERROR_FILE=(?!.*(NODEID|HOSTNAME|PROCID))", text):
        message = "one TORCHELASTIC_ERROR_FILE for all nodes: the launchers overwrite each other's report"
        yield warn("error file", message, "put $SLURM_NODEID into its name")
    if re.search(r"MASTER_PORT=\d+\b", text):
        message = "a fixed MASTER_PORT: two jobs on one node collide"
        yield warn("port", message, "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))")
    if "python -m trilane" in text and USED_BY not in text:
        message = "runs the code that is installed when the job starts, not the one that was submitted: an older script"
        yield warn("code", message, rewrite_remedy(case))


def internet(case: JobCheck) -> Iterator[JobFinding]:
    """Nothing needs the internet where compute nodes have none."""
    tokenizer = case.plan.data.tokenizer
    if tokenizer != "bytes" and not Path(tokenizer).is_dir():
        message = f"tokenizer {tokenizer} is not a folder here"
        yield refuse("internet", message, "download it first, and name its folder")
    if not case.site.offline:
        return
    if found := DOWNLOADS.search(case.script):
        message = f"compute nodes of {case.site.name} have no internet, and the script has: {found[0].strip()}"
        yield refuse("internet", message, "do it once on a login node")
    if "HF_HUB_OFFLINE=1" not in case.script:
        message = "without HF_HUB_OFFLINE=1 Hugging Face libraries wait minutes for a connection that cannot be made"
        yield warn("internet", message, "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1")


def container(case: JobCheck) -> Iterator[JobFinding]:
    """The site's image exists, and a container that mounts nothing by itself sees the corpus."""
    site, data = case.site, case.plan.data
    image = image_file(site)
    if image and not Path(image).exists():
        if client.is_installed():
            remedy = "pull or build the image, or correct the site's file"
            yield refuse("container", f"container_image={image}: no such file", remedy)
        else:
            yield warn("container", f"container_image={image}: no such file here", "check it on a login node")
    mounts = [mount.split(":")[0] for mount in site.container_mounts]
    for name, path in {"data.folder": data.folder, "data.source": data.source}.items():
        place, is_file = Path(path).resolve(), name == "data.folder" or "/" in path
        own = [case.folder.resolve(), *map(Path, mounts)]
        if site.container == "pyxis" and is_file and not any(map(place.is_relative_to, own)):
            message = f"{name}={place} is in none of container_mounts, and pyxis mounts only those"
            yield warn("container", message, f'add "{place}" to container_mounts, unless the cluster mounts it')


def readable(case: JobCheck) -> Iterator[JobFinding]:
    """bash can parse the script, and each line of the site's setup, which the script evaluates one by one."""
    texts = {"script": case.script}
    texts |= {f"site.setup, line {number}": line for number, line in enumerate(case.site.setup, 1)}
    for name, text in texts.items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            yield refuse("bash", f"{name}: {done.stderr.strip().splitlines()[0]}", "correct it")


def accepted(case: JobCheck) -> Iterator[JobFinding]:
    """sbatch --test-only accepts it: partition, constraint, account, QoS, node and GPU counts."""
    if case.site.is_local:
        return
    if case.slurm_problem:
        is_here = client.is_installed()
        remedy = "check again when it answers" if is_here else "run the check on a login node"
        yield (refuse if is_here else warn)("sbatch", case.slurm_problem, remedy)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(case.script)
        file.flush()
        try:
            client.test_only(Path(file.name))
        except client.SlurmError as error:
            remedy = "sinfo lists the partitions, sacctmgr show assoc the accounts and QoS that you may use"
            yield refuse("sbatch", str(error), remedy)


RULES: tuple[Rule, ...] = (
    directives,
    lacking,
    requested,
    spares,
    dead_ends,
    internet,
    container,
    readable,
    accepted,
)
