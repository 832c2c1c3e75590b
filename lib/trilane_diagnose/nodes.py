"""Nodes of a job: which of them train, which are at fault when the training ends, and what follows.

A node that has left the run is recorded in the ledger, and the job uses it no more. What follows is
decided by response.py alone. The job itself probes its nodes, because SLURM notices a dead one
only minutes later (SlurmdTimeout).
"""

import contextlib
import itertools
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trilane.logs.places import numbers_of
from trilane.slurm import attempt, client
from trilane.slurm.attempt import job_id
from trilane.utils.files import append_line
from trilane.utils.process import python, run
from trilane.utils.validation import require, shipped_json
from trilane.workspace import ledger, pace
from trilane.workspace.heartbeat import read_reports
from trilane.workspace.run import iteration
from trilane.workspace.status import RunStatus, Status, write_status
from trilane_diagnose.node_test import Findings, Tester, step
from trilane_diagnose.response import VERDICTS, Response, decide

# what srun prints of tasks that failed, such as "srun: error: n7: tasks 0-3: Exited with exit code
# 1" (SLURM 22.05)
FAILED_TASKS = re.compile(r"srun: error: ([\w.-]+): tasks? (\d+(?:[,-]\d+)*): ")
# what a lost node can look like in the log
LOST_NODE = shipped_json("ends")["lost_node"]
# the share of the median of a node that was slow in an earlier test: the ledger does not have it
SLOW_SHARE = 0.5
PROBE_S = 5.0  # in which a slurmd that is restarting takes connections again


def job_nodes() -> list[str]:
    """This job's nodes; ValueError outside a job."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    require(nodes, "SLURM_JOB_NODELIST", nodes, "is not set: this runs inside a job")
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

    best = sorted(left, key=lambda node: -slow.get(node, (1.0, ""))[0])[:count]
    left_out = dict(broken)
    for node, (_, reason) in slow.items():
        if node not in best:
            left_out[node] = reason
    return [node for node in nodes if node in best], left_out


def start_nodes(folder: Path, count: int, test: Tester | None) -> tuple[str, list[str]]:
    """The nodes of the next start as a SLURM node list, and a line about each that is left out,
    also in run.log.

    Where too few work, the attempt has ended as a node failure, the job is requeued, and ValueError
    names the nodes.
    """
    nodes = job_nodes()
    lost = dict.fromkeys(lost_nodes(folder), "has failed")
    left = [node for node in nodes if node not in lost]
    found = Findings()
    earlier = _of_allocation(folder, "nodes")
    if earlier:  # tested before the first start on these nodes: another would cost a minute
        left_out = earlier[-1]["left_out"].items()
        found = Findings(slow={n: (SLOW_SHARE, why) for n, why in left_out if n not in lost})
    elif test and len(left) > 1:
        found = test(left)
    _note_broken(folder, found.broken)
    try:
        chosen, left_out = choose(nodes, count, {**lost, **found.broken}, found.slow)
    except ValueError as error:
        _failed(folder, str(error))
        with contextlib.suppress(ValueError):
            response = decide("broken node", trained=(), left=nodes, blamed=[*lost, *found.broken])
            _carry_out(folder, response, str(error), len(nodes))
        raise
    ledger.note(folder, "nodes", job_id(), chosen=chosen, left_out=left_out)
    lines = [f"NODES {note}" for note in found.notes]
    lines += [f"NODE {node} is left out: {reason}" for node, reason in left_out.items()]
    for node in chosen:
        if node in found.slow:
            lines.append(f"NODE {node} is slow, and no spare is better: {found.slow[node][1]}")
    with contextlib.suppress(OSError):  # a full disk
        for line in lines:
            append_line(folder / "run.log", line)
    return client.call(["scontrol", "show", "hostlist", ",".join(chosen)]).strip(), lines


def _note_broken(folder: Path, nodes: Iterable[str]) -> None:
    """Record nodes of the job as failed: none of its later starts takes them. A later job of the
    run tests its own.
    """
    names = list(nodes)
    if names:
        ledger.note(folder, "node failure", job_id(), nodes=names)


def _failed(folder: Path, reason: str) -> None:
    """Record that the attempt ended by a node failure, outside of the training."""
    write_status(folder, RunStatus(status=Status.NODE_FAILURE, evidence=reason))
    ledger.note(folder, "ended", job_id(), status=Status.NODE_FAILURE, evidence=reason)


def end(folder: Path, code: int, test: Tester | None = None) -> RunStatus:
    """How the attempt ended; where a node is the reason, or it starts again, also what is done."""
    outcome = attempt.end(folder, code)
    is_slow = outcome.status is Status.STOPPED and f"by {pace.RESTART}" in outcome.evidence
    if is_slow or outcome.status.has_failed:
        with contextlib.suppress(ValueError):  # without SLURM the outcome stays as it is
            return _respond(folder, outcome, test, is_slow)
    return outcome


def _respond(folder: Path, outcome: RunStatus, test: Tester | None, is_slow: bool) -> RunStatus:
    """Find the nodes at fault, decide, and carry it out."""
    every = client.hostnames(os.environ.get("SLURM_JOB_NODELIST", ""))
    trained = training_nodes(folder)
    lost = lost_nodes(folder)
    left = [node for node in every if node not in lost]
    at = iteration(folder)
    past = [event for event in _of_allocation(folder, "response") if event["iteration"] == at]
    if is_slow:
        verdict = "slow node"
        faulty = dict.fromkeys(_of_hosts(left, pace.slowness(folder)[1]), "is slow")
    else:
        verdict, faulty = _at_fault(folder, left, trained, outcome, test)
    response = decide(
        verdict,
        trained=trained,
        left=left,
        blamed=faulty,
        tried=[event["action"] for event in past],
        may_requeue=_field(_shown(), "Requeue") == "1",
    )
    is_lost = verdict in ("dead node", "broken node")  # also where no spare takes its place
    _note_broken(folder, faulty if is_lost else response.nodes)
    if response.action == "stop" and not response.nodes:
        return outcome
    why = "; ".join(f"{node} {reason}" for node, reason in faulty.items())
    outcome = replace(
        outcome,
        status=Status.NODE_FAILURE if verdict == "dead node" else outcome.status,
        evidence="; ".join(filter(None, [str(response), why, f"the log: {outcome.evidence}"])),
        exclude=",".join(response.nodes),
    )
    write_status(folder, outcome)
    _carry_out(folder, response, outcome.evidence, len(every))
    return outcome


def _carry_out(folder: Path, response: Response, evidence: str, count: int) -> None:
    """Record the response in the ledger and the log; where it is that, requeue the job for so many
    nodes.
    """
    with contextlib.suppress(OSError):  # a full disk
        ledger.note(
            folder,
            "response",
            job_id(),
            verdict=response.verdict,
            action=response.action,
            again=response.action in ("spare", "same"),  # inside the same job
            nodes=response.nodes,
            iteration=iteration(folder),
            says=str(response),
        )
        append_line(folder / "run.log", f"trilane: {evidence}")
    if response.action == "requeue":
        with contextlib.suppress(ValueError):
            requeue(count, response.nodes)  # SLURM may not know yet that one is dead


def _at_fault(
    folder: Path,
    left: Sequence[str],
    trained: Sequence[str],
    outcome: RunStatus,
    test: Tester | None,
) -> tuple[str, dict[str, str]]:
    """The verdict and, by a probe, the log, the stacks or a test, the nodes that explain the end,
    each with the reason; of a hang the suspect's.
    """
    if outcome.status in LOST_NODE:
        dead = dict.fromkeys(_dead(folder, left), "cannot be reached")
        if set(dead) & set(trained or left):  # else a spare has died, which is no reason
            return "dead node", dead
        _note_broken(folder, dead)
        named = _of_hosts(left, outcome.exclude.split(","))
        reported = dict.fromkeys(named, f"is at fault ({outcome.status})")
        if reported and outcome.status is Status.HANG:
            return "frozen rank", reported
        if reported:
            return "broken node", reported
        # a GPU that has failed leaves its node alive
        if test and len(left) > len(trained) > 0:
            broken = test(left).broken
            if set(broken) & set(trained):
                return "broken node", broken
    suspects = []
    if outcome.status is Status.HANG:
        for report in read_reports(folder):
            if outcome.rank in [beat.rank for beat in report.ranks]:
                suspects = _of_hosts(left, [report.host])
    verdict = VERDICTS.get(outcome.status, "failure")
    return verdict, dict.fromkeys(suspects, f"has rank {outcome.rank}, the suspect")


def _of_hosts(nodes: Iterable[str], hosts: Iterable[str]) -> list[str]:
    """The nodes of those host names, either of which may have a domain."""
    names = {host.partition(".")[0] for host in hosts}
    return [node for node in nodes if node.partition(".")[0] in names]


def only_dead_are_left(folder: Path, lines: Iterable[str]) -> bool:
    """Whether a step waits for dead nodes alone: True as soon as every other node has reported that
    its tasks failed.

    `lines` are srun's error messages as they come. At the first of a failed task, for which srun
    ends the step (--kill-on-bad-exit), the nodes are probed, once. Where it is True, the dead are
    in the ledger. False at the end of the lines: none was dead at the probe, or a task ended well,
    of which srun prints nothing; srun ended the step.
    """
    nodes = training_nodes(folder) or job_nodes()
    tasks = int(os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    ended = Counter[str]()  # tasks by node
    dead = []
    for failed in filter(None, map(FAILED_TASKS.match, lines)):
        if not ended:
            dead = unreachable(nodes)
        ended[failed[1]] += len(numbers_of(failed[2].encode()))
        alive = [node for node in nodes if node not in dead]
        if dead and all(ended[node] >= tasks for node in alive):
            ledger.note(folder, "unreachable", job_id(), nodes=dead)
            return True
    return False


def goes_on(folder: Path) -> bool:
    """Whether the training starts again inside the job."""
    events = ledger.events(folder, "started", "ended", "response")
    own = [event for event in events if event["id"] == job_id()]
    return bool(own) and own[-1].get("again") is True


def _of_allocation(folder: Path, kind: str) -> list[ledger.Event]:
    """The ledger's events since the job has its present nodes: requeued, it keeps its id and gets
    others.
    """
    events = [event for event in ledger.events(folder) if event["id"] == job_id()]
    starts = [event for event in events if event["event"] == "started"]
    if not starts:
        return []
    first = next(e for e in starts if e.get("restarts") == starts[-1].get("restarts"))
    return [event for event in events[events.index(first) :] if event["event"] == kind]


def lost_nodes(folder: Path, kind: str = "node failure") -> list[str]:
    """The nodes that the job has and that have failed, or that events of another kind name."""
    nodes: dict[str, None] = {}
    for event in _of_allocation(folder, kind):
        nodes |= dict.fromkeys(event["nodes"])
    return list(nodes)


def training_nodes(folder: Path) -> list[str]:
    """The nodes that the job chose for its last start; empty where it did not choose."""
    choices = _of_allocation(folder, "nodes")
    return list(choices[-1]["chosen"]) if choices else []


def requeue(nodes: int, without: Sequence[str] = ()) -> bool:
    """Put the job back into the queue for `nodes` nodes, `without` those, if its script allows it.

    SLURM ends the processes of the job at once, this one too: first by SIGTERM, and KillWait (30 s
    by default) later by SIGKILL. In between the waiting job is changed: where a node has died under
    --no-kill, it asks for one fewer.
    """
    if _field(_shown(), "Requeue") != "1":
        return False
    job = job_id()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client.call(["scontrol", "requeue", job])
    with contextlib.suppress(ValueError):
        if nodes > 1:
            client.call(["scontrol", "update", f"JobId={job}", f"NumNodes={nodes}"])
        if without:
            # an update replaces the list
            avoided = client.hostnames(_field(_shown(), "ExcNodeList"))
            names = ",".join(dict.fromkeys([*avoided, *without]))
            client.call(["scontrol", "update", f"JobId={job}", f"ExcNodeList={names}"])
    return True


def _shown() -> str:
    return client.call(["scontrol", "show", "job", "-o", job_id()])


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
        if node not in lost_nodes(folder):
            # quietly: at the job's end SLURM reports that the step was cancelled
            run([*step([node]), *this])
        time.sleep(every_s)


def guard_first_node(folder: Path, every_s: float) -> None:
    """Wait until SLURM has taken the job's first node from it, then requeue or cancel the job.

    Under --no-kill SLURM would let the job hold its other nodes until its time limit, without the
    script, which ran on the first: seen on SLURM 22.05.
    """
    first = ""
    left: list[str] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to all steps before the time limit
    while not (first and left) or first in left:
        time.sleep(every_s)
        with contextlib.suppress(ValueError):
            shown = _shown()
            first = _field(shown, "BatchHost")
            left = client.hostnames(_field(shown, "NodeList"))
    _failed(folder, f"{first}, the first node, on which the job's script ran, has died")
    count = len({first, *left, *lost_nodes(folder)})
    _note_broken(folder, [first])
    if not requeue(count):
        client.call(["scancel", job_id()])


def _dead(folder: Path, nodes: Sequence[str]) -> list[str]:
    """Of several nodes those found dead during the step, else those that SLURM took or whose slurmd
    does not answer.
    """
    if len(nodes) < 2:  # the node on which this runs
        return []
    known = lost_nodes(folder, "unreachable")
    probed = [node for node in nodes if node in known]
    if probed:
        return probed
    left = client.hostnames(_field(_shown(), "NodeList")) or nodes
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
