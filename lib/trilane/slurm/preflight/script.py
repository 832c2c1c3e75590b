"""What the guard asks of the script, which a person may have edited: the traps that let a dead job live on."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trilane.slurm import client
from trilane.slurm.directives import gpus
from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, refuse, warn
from trilane.slurm.request import seconds_of
from trilane.slurm.script import SCRIPT

DIRECTIVES = ("account", "time", "qos", "partition", "constraint", "reservation", "exclude", "mail-user")

DOWNLOADS = re.compile(
    r"^[^#\n]*\b(?:pip3? install|conda install|git clone|wget|curl|huggingface-cli download|apt)\b", re.M
)

# Our torchrun; a shell that answers by the file `save`; ranks that srun starts itself.
HEEDS_SIGNAL = re.compile(
    r"""^[^#\n]*(trilane\.engine\.torchrun|trap ["'][^"'\n]+["'] USR1|srun [^\n]*-m trilane\.engine )""", re.M
)


def directives(case: JobCheck) -> Iterator[JobFinding]:
    """Nodes, tasks and GPUs of the script against the plan."""
    asked, every = case.directives, case.plan.topology.gpus
    used = min(every, case.cluster.gpus_per_node)
    wanted = {"nodes": str(case.nodes), "ntasks-per-node": "1"}
    if case.cluster.gpu.kind == "cuda":
        wanted |= {"gres": f"gpu:{used}", "gpus-per-node": str(used)}
    for name, value in wanted.items():
        if name in asked and not _same(name, asked[name], value):
            says = f"--{name}={asked[name]}, the plan's {every} GPUs need {value}"
            yield refuse("script", says, "change the script back, or the plan")
    started = re.search(r"--nproc-per-node=(\d+)", case.script)
    if started and int(started[1]) != used:
        says = f"{started[1]} processes a node, the plan's {every} GPUs need {used}"
        yield refuse("script", says, "change --nproc-per-node")
    if "array" not in asked and re.search(r"%[Aa]", asked.get("output", "")):
        yield warn("script", "%A and %a print 4294967294 in a job that is no array", "use %j")


def asked(case: JobCheck) -> Iterator[JobFinding]:
    """What was asked for now against what the script, written before, says."""
    for wish in case.request.given():
        name, value = {"time_limit": "time", "mail": "mail-user"}.get(wish, wish), getattr(case.request, wish)
        there = case.directives.get(name, "")
        if name in DIRECTIVES and not _same(name, there, value):
            says = f"--{name} {value} is asked for, {case.name} says {there or 'nothing of it'}"
            yield refuse("script", says, anew(case))


def _same(name: str, there: str, value: str) -> bool:
    """Whether two values of a directive ask for the same."""
    if name == "time" and there:
        return seconds_of(there) == seconds_of(value)
    if name in ("gres", "gpus-per-node"):
        head = "" if name == "gres" else "gpu:"
        return gpus(head + there) == gpus(head + value)
    return there in (value, f"{value}-{value}" if name == "nodes" else value)


def anew(case: JobCheck) -> str:
    """How the script gets what is asked for."""
    if case.name == SCRIPT:
        return f"edit {case.folder / SCRIPT}, or have `submit --rewrite --dry-run` write it anew"
    return f"edit {case.name}, or create the sweep anew in another folder"


def array(case: JobCheck) -> Iterator[JobFinding]:
    """Whether SLURM takes jobs of such a number in an array."""
    lines = [int(n) for n in re.findall(r"\d+", case.directives.get("array", "").partition("%")[0])]
    if not lines or case.site.is_local or not client.is_installed():
        return
    try:
        largest = client.max_array()
    except client.SlurmError:
        return  # `accepted` says it
    if largest is not None and max(lines) > largest:
        says = f"--array goes up to {max(lines)}, SLURM here takes {largest} (MaxArraySize={largest + 1})"
        yield refuse("array", says, f"sweeps of at most {largest} runs each")


def dead_ends(case: JobCheck) -> Iterator[JobFinding]:
    """What keeps a failed job running, or calls it COMPLETED."""
    text = case.script
    if "srun" in text and "--kill-on-bad-exit=1" not in text:
        says = "srun without --kill-on-bad-exit=1: when one node dies, the others wait until the time limit"
        yield refuse("kill-on-bad-exit", says, "srun --kill-on-bad-exit=1 --wait=60 ...")
    if "| tee" in text and "pipefail" not in text:
        says = "a pipe into tee without pipefail: a failed run would be COMPLETED, and what waits for it would start"
        yield refuse("pipefail", says, "set -euo pipefail")
    if "signal" in case.directives and not HEEDS_SIGNAL.search(text):
        says = "SIGUSR1 before the limit may reach the launcher alone, which dies of it or ignores it: nothing is saved"
        yield refuse("signal", says, "python -m trilane.engine.torchrun hands it on; or trap 'touch save' USR1")
    if re.search(r"TORCHELASTIC_ERROR_FILE=(?!.*(NODEID|HOSTNAME|PROCID))", text):
        says = "one TORCHELASTIC_ERROR_FILE for all nodes: each launcher overwrites the others' report"
        yield warn("error file", says, "put $SLURM_NODEID into its name")
    if re.search(r"MASTER_PORT=\d+\b", text):
        says = "a fixed MASTER_PORT: two jobs on one node meet"
        yield warn("port", says, "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))")


def internet(case: JobCheck) -> Iterator[JobFinding]:
    """What asks for the internet where compute nodes have none."""
    tokenizer = case.plan.data.tokenizer
    if tokenizer != "bytes" and not Path(tokenizer).is_dir():
        yield refuse("internet", f"tokenizer {tokenizer} is no folder here", "download it first, and name its folder")
    if not case.site.offline:
        return
    if found := DOWNLOADS.search(case.script):
        says = f"compute nodes of {case.site.name} have no internet, and the script says: {found[0].strip()}"
        yield refuse("internet", says, "do it once on a login node")
    if "HF_HUB_OFFLINE=1" not in case.script:
        says = "without HF_HUB_OFFLINE=1 a Hugging Face library waits minutes for an internet that is not there"
        yield warn("internet", says, "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1")


def readable(case: JobCheck) -> Iterator[JobFinding]:
    """bash can read it."""
    done = subprocess.run(["bash", "-n"], input=case.script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield refuse("bash", done.stderr.strip().splitlines()[0], "correct the script")


def accepted(case: JobCheck) -> Iterator[JobFinding]:
    """sbatch --test-only: partition, constraint, account, QoS, node and GPU counts as SLURM itself knows them."""
    if case.site.is_local:
        return
    if not client.is_installed():
        yield warn("sbatch", "sbatch is not installed here, so SLURM was not asked", "run the guard on a login node")
        return
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
        file.write(case.script)
        file.flush()
        try:
            client.test_only(Path(file.name))
        except client.SlurmError as error:
            yield refuse("sbatch", str(error), "sinfo and sacctmgr show assoc say what there is and what you may use")


RULES: tuple[Rule, ...] = (directives, asked, array, dead_ends, internet, readable, accepted)
