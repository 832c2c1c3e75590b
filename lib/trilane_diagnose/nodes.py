"""Nodes of a job: which of them train, and what happens when one fails.

A failed node is recorded in the ledger, and the job uses it no more. The training starts again: on
a spare node where the job has one, else once the job, requeued, has other nodes. The job itself
probes its nodes, because SLURM notices a dead one only minutes later (SlurmdTimeout).
"""

import contextlib
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from trilane.slurm import attempt, client
from trilane.slurm.attempt import job_id
from trilane.utils.files import append_line
from trilane.utils.process import python, run
from trilane.utils.validation import require
from trilane.workspace import ledger, pace
from trilane.workspace.run import iteration
from trilane.workspace.status import RunStatus, Status, write_status
from trilane_diagnose.node_test import Findings, step

Tester = Callable[[Sequence[str]], Findings]
# what srun prints of tasks that failed, such as "srun: error: n7: tasks 0-3: Exited with exit code
# 1" (SLURM 22.05)
FAILED_TASKS = re.compile(r"srun: error: ([\w.-]+): tasks? (\d+(?:[,-]\d+)*): ")
# what a lost node can look like in the log
LOST_NODE = (
    Status.CRASHED,
    Status.NCCL_ERROR,
    Status.HANG,
    Status.NODE_FAILURE,
    Status.RENDEZVOUS,
    Status.GPU_ERROR,
    Status.NETWORK,
    Status.KILLED,
)
# the share of the median of a node that was slow in an earlier test: the ledger does not have it
SLOW_SHARE = 0.5
PROBE_S = 5.0  # in which a slurmd that is restarting takes connections again


def job_nodes(env: Mapping[str, str] = os.environ) -> list[str]:
    """This job's nodes; ValueError outside a job."""
    nodes = env.get("SLURM_JOB_NODELIST", "")
    require(bool(nodes), "SLURM_JOB_NODELIST", nodes, "is not set: this runs inside a job")
    return client.hostnames(nodes)


def choose(
    nodes: Sequence[str],
    count: int,
    broken: Mapping[str, str],
    slow: Mapping[str, tuple[float, str]],
) -> tuple[list[str], dict[str, str]]:
    """The first `count` nodes that are neither broken nor slow, else the least slow; and why others
    stay out.

    The first, because neighbours in the list are neighbours in the network. ValueError where too
    few are left.
    """
    left = [node for node in nodes if node not in broken]
    reasons = "; ".join(f"{node}: {reason}" for node, reason in broken.items())
    rule = f"the plan needs {count} nodes, and {len(left)} of the job's {len(nodes)} are left"
    require(len(left) >= count, "nodes", ",".join(left) or "none", f"{rule}: {reasons}")

    def slowness(node: str) -> float:
        return -slow[node][0] if node in slow else -1.0

    best = sorted(left, key=slowness)[:count]
    left_out = dict(broken)
    for node, (_, reason) in slow.items():
        if node not in best:
            left_out[node] = reason
    return [node for node in nodes if node in best], left_out


def start_nodes(
    folder: Path, count: int, test: Tester | None, env: Mapping[str, str] = os.environ
) -> tuple[str, list[str]]:
    """The nodes of the next start as a SLURM node list, and a line about each that is left out,
    also in run.log.

    Where too few work, the attempt has ended as a node failure, the job is requeued, and ValueError
    names the nodes.
    """
    job = job_id(env)
    nodes = job_nodes(env)
    lost = dict.fromkeys(lost_nodes(folder, job), "has failed")
    left = [node for node in nodes if node not in lost]
    found = Findings()
    earlier = _of_allocation(folder, job, "nodes")
    if earlier:  # tested before the first start on these nodes: another would cost a minute
        slow = {}
        for node, reason in earlier[-1]["left_out"].items():
            if node not in lost:
                slow[node] = (SLOW_SHARE, reason)
        found = Findings(slow=slow)
    elif test and len(left) > 1:
        found = test(left)
    _note_broken(folder, job, found.broken)
    try:
        chosen, left_out = choose(nodes, count, {**lost, **found.broken}, found.slow)
    except ValueError as error:
        _failed(folder, job, str(error))
        with contextlib.suppress(ValueError):
            requeue(job, len(nodes), list(found.broken))
        raise
    ledger.note(folder, "nodes", job, chosen=chosen, left_out=left_out)
    lines = [f"NODES {note}" for note in found.notes]
    lines += [f"NODE {node} is left out: {reason}" for node, reason in left_out.items()]
    for node in chosen:
        if node in found.slow:
            lines.append(f"NODE {node} is slow, and no spare is better: {found.slow[node][1]}")
    with contextlib.suppress(OSError):  # a full disk
        for line in lines:
            append_line(folder / "run.log", line)
    return client.call(["scontrol", "show", "hostlist", ",".join(chosen)]).strip(), lines


def _note_broken(folder: Path, job: str, nodes: Iterable[str]) -> None:
    """Record nodes of the job as failed: none of its later starts takes them. A later job of the
    run tests its own.
    """
    names = list(nodes)
    if names:
        ledger.note(folder, "node failure", job, nodes=names)


def _failed(folder: Path, job: str, reason: str) -> None:
    """Record that the attempt ended by a node failure, outside of the training."""
    write_status(folder, attempt.status_of(Status.NODE_FAILURE, reason))
    ledger.note(folder, "ended", job, status=Status.NODE_FAILURE, evidence=reason)


def end(
    folder: Path, code: int, env: Mapping[str, str] = os.environ, test: Tester | None = None
) -> RunStatus:
    """How the attempt ended; "node failure" where one of its nodes is the reason.

    A spare takes its place (event "replaced"); else the job is requeued: SLURM itself requeues only
    what still runs.
    """
    outcome = attempt.end(folder, code, env)
    job = job_id(env)
    nodelist = env.get("SLURM_JOB_NODELIST", "")
    if outcome.status is Status.STOPPED and f"by {pace.RESTART}" in outcome.evidence:
        return _replace_slow(folder, job, nodelist, outcome)
    if outcome.status in LOST_NODE:
        with contextlib.suppress(ValueError):  # without SLURM the outcome stays as it is
            return _replace_failed(folder, job, nodelist, outcome, test)
    return outcome


def _replace_failed(
    folder: Path, job: str, nodelist: str, outcome: RunStatus, test: Tester | None
) -> RunStatus:
    """Look for nodes that explain the end, by a probe, the log, or a test; ValueError where SLURM
    does not answer.
    """
    every = client.hostnames(nodelist)
    trained = training_nodes(folder, job)
    lost = lost_nodes(folder, job)
    nodes = [node for node in every if node not in lost]
    reported = []  # by an Xid in the log
    faulty = dict.fromkeys(_dead(folder, job, nodes), "cannot be reached")
    if not faulty:
        reported = [node for node in nodes if node in outcome.exclude.split(",")]
        faulty = dict.fromkeys(reported, f"is at fault ({outcome.status})")
    # by a test, while there is a spare: a GPU that has failed leaves its node alive
    if not faulty and test and len(nodes) > len(trained) > 0:
        faulty = dict(test(nodes).broken)
    _note_broken(folder, job, faulty)
    if not set(faulty) & set(trained or nodes):
        return outcome  # a spare may have died: no reason for the training to fail
    reasons = "; ".join(f"{node} {why}" for node, why in faulty.items())
    outcome = replace(
        outcome,
        status=outcome.status if reported else Status.NODE_FAILURE,
        evidence=f"{reasons}; the log: {outcome.evidence}",
        exclude=",".join(faulty),
    )
    write_status(folder, outcome)
    if trained and len(nodes) - len(faulty) >= len(trained):
        ledger.note(folder, "replaced", job, nodes=list(faulty), iteration=iteration(folder))
    else:
        with contextlib.suppress(ValueError):
            requeue(job, len(every), list(faulty) if test or reported else [])
    return outcome


def _replace_slow(folder: Path, job: str, nodelist: str, outcome: RunStatus) -> RunStatus:
    """Have spares take the place of the nodes that made a run slow, which saved and stopped itself;
    the last of them stay where spares have failed since.
    """
    named = {node.partition(".")[0] for node in pace.slowness(folder)[1]}
    trained = training_nodes(folder, job)
    lost = lost_nodes(folder, job)
    slow = [node for node in trained if node.partition(".")[0] in named]
    nodes = [node for node in client.hostnames(nodelist) if node not in lost]
    replaced = slow[: max(len(nodes) - len(trained), 0)]
    _note_broken(folder, job, replaced)
    ledger.note(folder, "replaced", job, nodes=slow, iteration=iteration(folder))
    evidence = f"slow with {', '.join(slow)}; {outcome.evidence}"
    return replace(outcome, evidence=evidence, exclude=",".join(replaced))


def only_dead_are_left(
    folder: Path, lines: Iterable[str], env: Mapping[str, str] = os.environ
) -> bool:
    """Whether a step waits for dead nodes alone: True as soon as every other node has reported that
    its tasks failed.

    `lines` are srun's error messages as they come. At the first of a failed task, for which srun
    ends the step (--kill-on-bad-exit), the nodes are probed, once. Where it is True, the dead are
    in the ledger. False at the end of the lines: none was dead at the probe, or a task ended well,
    of which srun prints nothing; srun ended the step.
    """
    job = job_id(env)
    nodes = training_nodes(folder, job) or job_nodes(env)
    tasks = int(env.get("SLURM_NTASKS_PER_NODE") or 1)
    ended: dict[str, set[int]] = {}
    dead: list[str] = []
    for failed in filter(None, map(FAILED_TASKS.match, lines)):
        if not ended:
            dead = unreachable(nodes)
        for numbers in failed[2].split(","):
            first, _, last = numbers.partition("-")
            own = ended.setdefault(failed[1], set())
            own.update(range(int(first), int(last or first) + 1))
        alive = [node for node in nodes if node not in dead]
        if dead and all(len(ended.get(node, ())) >= tasks for node in alive):
            ledger.note(folder, "unreachable", job, nodes=dead)
            return True
    return False


def goes_on(folder: Path, job: str) -> str:
    """The nodes of the job that spares replace before its next start; "" where the job ends."""
    events = [e for e in ledger.events(folder, "started", "ended", "replaced") if e["id"] == job]
    if events and events[-1]["event"] == "replaced":
        return ", ".join(events[-1]["nodes"])
    return ""


def _of_allocation(folder: Path, job: str, kind: str) -> list[dict[str, Any]]:
    """The ledger's events since the job has its present nodes: requeued, it keeps its id and gets
    others.
    """
    events = [event for event in ledger.events(folder) if event["id"] == job]
    starts = [event for event in events if event["event"] == "started"]
    if not starts:
        return []
    first = next(e for e in starts if e.get("restarts") == starts[-1].get("restarts"))
    since = events[events.index(first) :]
    return [event for event in since if event["event"] == kind]


def lost_nodes(folder: Path, job: str) -> list[str]:
    """The nodes that the job has and that have failed."""
    nodes: dict[str, None] = {}
    for event in _of_allocation(folder, job, "node failure"):
        nodes |= dict.fromkeys(event["nodes"])
    return list(nodes)


def training_nodes(folder: Path, job: str) -> list[str]:
    """The nodes that the job chose for its last start; empty where it did not choose."""
    choices = _of_allocation(folder, job, "nodes")
    return list(choices[-1]["chosen"]) if choices else []


def exclude(job: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job off `nodes`, and off those that it already avoids."""
    # an update replaces the list
    avoided = client.hostnames(_field(_shown(job), "ExcNodeList"))
    names = ",".join(dict.fromkeys([*avoided, *nodes]))
    client.call(["scontrol", "update", f"JobId={job}", f"ExcNodeList={names}"])


def requeue(job: str, nodes: int, without: Sequence[str] = ()) -> bool:
    """Put the job back into the queue for `nodes` nodes, `without` those, if its script allows it.

    SLURM ends the processes of the job at once, this one too: first by SIGTERM, and KillWait (30 s
    by default) later by SIGKILL. In between the waiting job is changed: where a node has died under
    --no-kill, it asks for one fewer.
    """
    if _field(_shown(job), "Requeue") != "1":
        return False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client.call(["scontrol", "requeue", job])
    with contextlib.suppress(ValueError):
        if nodes > 1:
            client.call(["scontrol", "update", f"JobId={job}", f"NumNodes={nodes}"])
        if without:
            exclude(job, without)
    return True


def _shown(job: str) -> str:
    return client.call(["scontrol", "show", "job", "-o", job])


def _field(shown: str, name: str) -> str:
    """A field of `scontrol show job -o`; "" where it is missing or "(null)"."""
    match = re.search(rf"\s{name}=([^\s(]+)", shown)
    return match[1] if match else ""


def guard(folder: Path, every_s: float) -> None:
    """Keep `guard_first_node` running on another node of the job, until this process is ended; on
    the first node.
    """
    command = ["-m", "trilane", "slurm", "job", "guard", str(folder)]
    this = python(*command, "--every", f"{every_s:g}", "--here")
    for node in itertools.cycle(reversed(job_nodes()[1:])):
        if node not in lost_nodes(folder, job_id()):
            # quietly: at the job's end SLURM reports that the step was cancelled
            run([*step([node]), *this])
        time.sleep(every_s)


def guard_first_node(folder: Path, every_s: float) -> None:
    """Wait until SLURM has taken the job's first node from it, then requeue or cancel the job.

    Under --no-kill SLURM would let the job hold its other nodes until its time limit, without the
    script, which ran on the first: seen on SLURM 22.05.
    """
    job = job_id()
    first = ""
    left: list[str] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to all steps before the time limit
    while not (first and left) or first in left:
        time.sleep(every_s)
        with contextlib.suppress(ValueError):
            shown = _shown(job)
            first = _field(shown, "BatchHost")
            left = client.hostnames(_field(shown, "NodeList"))
    _failed(folder, job, f"{first}, the first node, on which the job's script ran, has died")
    count = len({first, *left, *lost_nodes(folder, job)})
    _note_broken(folder, job, [first])
    if not requeue(job, count):
        client.call(["scancel", job])


def _dead(folder: Path, job: str, nodes: Sequence[str]) -> list[str]:
    """Of several nodes those found dead during the step, else those that SLURM took or whose slurmd
    does not answer.
    """
    if len(nodes) < 2:  # the node on which this runs
        return []
    known: set[str] = set()
    for event in _of_allocation(folder, job, "unreachable"):
        known.update(event["nodes"])
    probed = [node for node in nodes if node in known]
    if probed:
        return probed
    left = client.hostnames(_field(_shown(job), "NodeList")) or nodes
    taken = [node for node in nodes if node not in left]
    return taken + unreachable([node for node in nodes if node in left])


def unreachable(nodes: Sequence[str]) -> list[str]:
    """The nodes whose slurmd takes no TCP connection within PROBE_S; for use inside the job.

    All at once, after one question to the controller, which may limit requests to 2 a second. A
    refusal is tried again: slurmd may be restarting. Not found: a node that is frozen, whose kernel
    may still accept for it. Empty where none accepts: then the network of this node is at fault.
    """
    shown = client.call(["scontrol", "show", "node", "-o", ",".join(nodes)])
    config = client.call(["scontrol", "show", "config"])
    usual_port = _field(re.sub(" += ", "=", config), "SlurmdPort")
    lines = {_field(f" {line}", "NodeName"): line for line in shown.splitlines()}
    end = time.monotonic() + PROBE_S

    def is_dead(node: str) -> bool:
        line = lines.get(node, "")
        address = _field(line, "NodeAddr") or node
        port = _field(line, "Port") or usual_port  # a node shows only a port of its own
        while (left_s := end - time.monotonic()) > 0:
            with contextlib.suppress(OSError, ValueError):
                socket.create_connection((address, int(port)), left_s).close()
                return False
            time.sleep(0.5)
        return True

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        answers = list(pool.map(is_dead, nodes))
    if all(answers):
        return []
    return [node for node, dead in zip(nodes, answers, strict=True) if dead]
