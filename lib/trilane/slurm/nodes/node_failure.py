"""Node failures: an attempt that lost a node is recorded, later jobs avoid the node, and the training starts again: on
a spare node of the job where it has one, else when the job comes out of the queue again.

The job itself probes its nodes: SLURM notices a dead node only minutes later (SlurmdTimeout).
"""

import contextlib
import itertools
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trilane.slurm import client, ledger
from trilane.slurm.nodes.exclusion import exclude
from trilane.utils.process import python
from trilane.workspace.run_folder import iteration
from trilane.workspace.status import RunStatus, Status, write_status

Test = Callable[[Sequence[str]], Mapping[str, str]]  # the broken ones of nodes, and why
STEP_S = 30.0  # in which a step starts on a healthy node many times
POLL_S = 0.1


def handle_node_failure(
    folder: Path, job: str, nodelist: str, outcome: RunStatus, test: Test | None = None
) -> RunStatus:
    """The outcome of this job's attempt, with status "node failure" where one of its nodes cannot be reached, or a
    `test` of the nodes, made while there is a spare, finds one broken: a GPU that has failed leaves its node alive. No
    test is made where the log names a node at fault, such as by an Xid error.

    Then the folder's later jobs exclude the node. A spare takes its place (event "replaced"); where none is left, the
    job is requeued if its script allows it: SLURM itself does so only while the job runs, and notices a dead node
    minutes after srun has failed.
    """
    if not outcome.status.may_be_node_failure:
        return outcome
    with contextlib.suppress(ValueError):  # without SLURM the outcome stays as it is
        every = client.hostnames(nodelist)
        nodes = [node for node in every if node not in lost_nodes(folder, job)]
        trained = training_nodes(folder, job)
        dead = dict.fromkeys(_dead(job, nodes) if len(nodes) > 1 else (), "cannot be reached")
        reported = [node for node in nodes if node in outcome.exclude.split(",")] if not dead else []
        dead |= dict.fromkeys(reported, f"is at fault ({outcome.status})")
        if not dead and test and len(nodes) > len(trained) > 0:
            dead = dict(test(nodes))
        if dead:
            avoid(folder, job, list(dead))
        if not set(dead) & set(trained or nodes):  # a spare may have died: that is no reason
            return outcome
        reasons = "; ".join(
            f"{', '.join(n for n in dead if dead[n] == why)} {why}" for why in dict.fromkeys(dead.values())
        )
        reason = f"{reasons}; the log: {outcome.evidence}"
        status = outcome.status if reported else Status.NODE_FAILURE
        outcome = replace(outcome, status=status, evidence=reason, exclude=",".join(dead))
        write_status(folder, outcome)
        left = [node for node in nodes if node not in dead]
        if trained and len(left) >= len(trained):
            ledger.note(folder, "replaced", job, nodes=list(dead), iteration=iteration(folder))
        else:
            requeue(job, nodes=len(every), without=list(dead) if test or reported else [])
    return outcome


def goes_on(folder: Path, job: str) -> str:
    """Which nodes of the job are replaced by spares before its next start; "" where the job ends."""
    mine = [e for e in ledger.events(folder, "started", "ended", "replaced") if e["id"] == job]
    return ", ".join(node for e in mine[-1:] if e["event"] == "replaced" for node in e["nodes"])


def of_allocation(folder: Path, job: str) -> list[dict[str, Any]]:
    """The ledger's events since the job has its present nodes: requeued, it keeps its id and gets others."""
    events = ledger.events(folder)
    starts = [(i, e.get("restarts")) for i, e in enumerate(events) if e["event"] == "started" and e["id"] == job]
    first = next((i for i, restarts in starts if restarts == starts[-1][1]), len(events))
    return [e for e in events[first:] if e["id"] == job]


def lost_nodes(folder: Path, job: str) -> list[str]:
    """The nodes that the job has and that have failed."""
    failures = [e["nodes"] for e in of_allocation(folder, job) if e["event"] == "node failure"]
    return list(dict.fromkeys(node for nodes in failures for node in nodes))


def training_nodes(folder: Path, job: str) -> list[str]:
    """The nodes that the job chose for its last start; empty where it did not choose."""
    choices = [e["chosen"] for e in of_allocation(folder, job) if e["event"] == "nodes"]
    return list(choices[-1]) if choices else []


def _dead(job: str, nodes: Sequence[str]) -> list[str]:
    """The nodes that SLURM has taken from the job, or on which no step can be started."""
    left = client.hostnames(_field(client.call(["scontrol", "show", "job", "-o", job]), "NodeList")) or nodes
    taken = [node for node in nodes if node not in left]
    rest = [node for node in nodes if node in left]
    return taken + (unreachable(rest) if len(rest) > 1 else [])


def _field(shown: str, name: str) -> str:
    """A field of `scontrol show job -o`; "" where it is missing or "(null)"."""
    found = re.search(rf"\s{name}=(\S+)", shown)
    return found[1] if found and found[1] != "(null)" else ""


def requeue(job: str, nodes: int = 0, without: Sequence[str] = ()) -> bool:
    """Put the job back into the queue, if its script allows it: for `nodes` nodes, `without` those.

    SLURM ends the processes of the job at once, this one too: first by SIGTERM, and KillWait (30 s by default) later by
    SIGKILL. In between the waiting job is changed: where a node has died under --no-kill, it asks for one fewer.
    """
    if _field(client.call(["scontrol", "show", "job", "-o", job]), "Requeue") != "1":
        return False
    with _ignoring(signal.SIGTERM):
        client.call(["scontrol", "requeue", job])
        with contextlib.suppress(ValueError):
            if nodes > 1:
                client.call(["scontrol", "update", f"JobId={job}", f"NumNodes={nodes}"])
            if without:
                exclude(job, without)
    return True


@contextlib.contextmanager
def _ignoring(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def guard(folder: Path, job: str, nodelist: str, every_s: float) -> None:
    """Keep `guard_first_node` running on another node of the job, until this process is ended; on the first node."""
    _, *others = client.hostnames(nodelist)
    options = step_options(client.call(["srun", "--version"]))
    this = python("-m", "trilane", "slurm", "job", "guard", str(folder), "--every", f"{every_s:g}", "--here")
    for node in itertools.cycle(reversed(others)):
        if node not in lost_nodes(folder, job):
            one = ["srun", *options, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}"]
            quiet = subprocess.DEVNULL  # at the job's end SLURM would report that the step was cancelled
            subprocess.run([*one, *this], stdin=quiet, stdout=quiet, stderr=quiet, check=False)
        time.sleep(every_s)


def guard_first_node(folder: Path, job: str, every_s: float) -> None:
    """Wait until SLURM has taken the job's first node from it, then requeue or cancel the job.

    Under --no-kill SLURM would let the job hold its other nodes until its time limit, without the script, which ran on
    the first: seen on SLURM 22.05.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to all steps before the time limit
    while True:
        time.sleep(every_s)
        with contextlib.suppress(ValueError):
            shown = client.call(["scontrol", "show", "job", "-o", job])
            first, left = _field(shown, "BatchHost"), client.hostnames(_field(shown, "NodeList"))
            if first and left and first not in left:
                reason = f"{first}, the first node, on which the job's script ran, has died"
                outcome = RunStatus(status=Status.NODE_FAILURE, evidence=reason, rank=None, exit_code=1, seconds=0.0)
                write_status(folder, outcome)
                ledger.note(folder, "ended", job, status=outcome.status, evidence=reason)
                nodes = len({first, *left, *lost_nodes(folder, job)})
                avoid(folder, job, [first])
                if not requeue(job, nodes=nodes):
                    client.call(["scancel", job])
                return


def note_lost_nodes(folder: Path) -> None:
    """Record the nodes of the last attempt that SLURM lists as down by now, and exclude them from waiting jobs."""
    events = ledger.events(folder)
    begun = [i for i, e in enumerate(events) if e["event"] == "started"]
    if not begun:
        return
    noted = set(lost_nodes(folder, events[begun[-1]]["id"]))
    with contextlib.suppress(ValueError):  # a SLURM that does not answer must not prevent the training
        dead = set(client.hostnames(events[begun[-1]]["nodes"])) & set(client.down_nodes()) - noted
        if dead:
            avoid(folder, events[begun[-1]]["id"], sorted(dead))


def waiting(folder: Path, job: str) -> list[str]:
    """The folder's other jobs that have not started."""
    states = client.states([i for i in ledger.job_ids(folder) if i != job and client.JOB_ID.fullmatch(i)])
    return [i for i, state in states.items() if state.state == "PENDING"]


def avoid(folder: Path, job: str, dead: Sequence[str]) -> None:
    """Record nodes of the job as failed, and keep the folder's waiting jobs off them, as far as enough others exist."""
    earlier = [node for event in ledger.events(folder, "node failure") for node in event["nodes"]]
    ledger.note(folder, "node failure", job, nodes=list(dead))
    for later in waiting(folder, job):
        exclude(later, dead, list(dict.fromkeys(earlier)))


OVERLAP_FROM = (20, 11)  # the first SLURM in which a step shares its job's resources only with --overlap

UNREACHABLE = re.compile(
    r"[Cc]ommunication|[Cc]onnection|[Tt]imed out|[Nn]o route|[Nn]ot responding|[Hh]ost is down|NODE_FAIL|[Nn]ode fail"
)


def step_options(version: str = "") -> list[str]:
    """The srun options of a step that runs next to the others of its job; `version` is `srun --version` ("": recent).

    Without --overlap it would wait until the others end. --gres=gpu:0 and --mem=0 request no GPU and no memory, which
    a step that could not end on a dead node may still hold.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2]) or OVERLAP_FROM
    return ["--overlap"] * (numbers >= OVERLAP_FROM) + ["--mem=0", "--gres=gpu:0", "--cpus-per-task=1"]


def unreachable(nodes: Sequence[str]) -> list[str]:
    """The nodes on which no step can be started within STEP_S seconds of the last answer; to be called inside the job.

    A step on a healthy node starts in a second or two, but a controller that limits the rate of requests answers 128
    of them one after another (rl_enable, man slurm.conf: by default 30 at once, then 2 a second). Empty where none can
    be started: then srun itself fails, since this process runs on one of the nodes.
    """
    options = step_options(client.call(["srun", "--version"]))
    one = ["srun", *options, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    steps = {n: subprocess.Popen([*one, f"--nodelist={n}", "true"], **streams, text=True) for n in nodes}
    waits, last = set(nodes), time.monotonic()
    while waits and time.monotonic() < last + STEP_S:
        if ended := {node for node in waits if steps[node].poll() is not None}:
            waits, last = waits - ended, time.monotonic()
        time.sleep(POLL_S)
    found = [node for node, step in steps.items() if not _is_reachable(step)]
    return found if len(found) < len(nodes) else []


def _is_reachable(step: "subprocess.Popen[str]") -> bool:
    """Whether the step succeeded, or failed for another reason than an unreachable node; one that goes on is ended."""
    if step.poll() is None:
        step.kill()
        step.communicate()
        return False
    _, error = step.communicate()
    return step.returncode == 0 or UNREACHABLE.search(error) is None
