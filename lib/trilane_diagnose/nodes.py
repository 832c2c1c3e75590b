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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from trilane.slurm import attempt, client, ledger
from trilane.slurm.attempt import job_id
from trilane.utils.files import append_line
from trilane.utils.process import python, run
from trilane.utils.validation import require
from trilane.workspace import pace
from trilane.workspace.run_folder import iteration
from trilane.workspace.status import RunStatus, Status, write_status
from trilane_diagnose import node_test

Tester = Callable[[Sequence[str]], node_test.Findings]
# what srun prints of tasks that failed, such as "srun: error: n7: tasks 0-3: Exited with exit code
# 1" (SLURM 22.05)
FAILED_TASKS = re.compile(r"srun: error: ([\w.-]+): tasks? (\d+(?:[,-]\d+)*): ")


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
    rule = f"the plan needs {count} nodes, and {len(left)} of the job's {len(nodes)} are left: {reasons}"
    require(len(left) >= count, "nodes", ",".join(left) or "none", rule)
    best = sorted(left, key=lambda node: -slow[node][0] if node in slow else -1.0)[:count]
    return [n for n in nodes if n in best], {
        **broken,
        **{n: why for n, (_, why) in slow.items() if n not in best},
    }


def start_nodes(
    folder: Path, count: int, test: Tester | None, env: Mapping[str, str] = os.environ
) -> tuple[str, list[str]]:
    """The nodes of the next start as a SLURM node list, and a line about each that is left out,
    also in run.log.

    Where too few work, the attempt has ended as a node failure, the job is requeued, and ValueError
    names the nodes; not requeued where all nodes are far below the cluster file.
    """
    job, nodes = job_id(env), job_nodes(env)
    lost = dict.fromkeys(lost_nodes(folder, job), "has failed")
    left = [node for node in nodes if node not in lost]
    found = _known(folder, job, lost) or (
        test(left) if test and len(left) > 1 else node_test.Findings()
    )
    _note_broken(folder, job, found.broken)
    if found.refused:  # other nodes of the cluster would be no better: no requeue
        _failed(folder, job, found.refused)
        raise ValueError(found.refused)
    try:
        chosen, left_out = choose(nodes, count, {**lost, **found.broken}, found.slow)
    except ValueError as error:
        _failed(folder, job, str(error))
        with contextlib.suppress(ValueError):
            requeue(job, len(nodes), list(found.broken))
        raise
    ledger.note(folder, "nodes", job, chosen=chosen, left_out=left_out)
    lines = [*_recovery(folder, job), *(f"NODES {note}" for note in found.notes)]
    lines += [f"NODE {node} is left out: {reason}" for node, reason in left_out.items()]
    lines += [
        f"NODE {n} is slow, and no spare is better: {found.slow[n][1]}"
        for n in chosen
        if n in found.slow
    ]
    with contextlib.suppress(OSError):  # a full disk
        for line in lines:
            append_line(folder / "run.log", line)
    return client.call(["scontrol", "show", "hostlist", ",".join(chosen)]).strip(), lines


def _known(folder: Path, job: str, lost: Collection[str]) -> node_test.Findings | None:
    """After a plain death, what the test at the job's start found: another would cost a minute.
    Else None.
    """
    replaced, chosen = (_of_allocation(folder, job, kind)[-1:] for kind in ("replaced", "nodes"))
    if not (replaced and replaced[0].get("tested") and chosen):
        return None
    # their share of the median is not in the ledger
    return node_test.Findings(
        slow={n: (0.5, why) for n, why in chosen[0]["left_out"].items() if n not in lost}
    )


def _recovery(folder: Path, job: str) -> list[str]:
    """Where a spare has just taken a place: how long each phase took (s), in a line; START and the
    ranks follow it.
    """
    last = [e for e in ledger.events(folder, "ended", "replaced") if e["id"] == job][-2:]
    if [e["event"] for e in last] != ["ended", "replaced"]:
        return []
    ages, steps = [ledger.age_s(e) for e in last], folder / "steps.jsonl"
    trained = time.time() - steps.stat().st_mtime if steps.exists() else ages[0]
    # the ledger has whole seconds
    ended, probed, chosen = (max(0.0, trained - age) for age in (*ages, 0.0))
    times = f"step ended {ended:.0f} s, nodes probed {probed:.0f} s, nodes chosen {chosen:.0f} s"
    return [f"RECOVERY {times} after the last iteration"]


def _note_broken(folder: Path, job: str, nodes: Iterable[str]) -> None:
    """Record nodes of the job as failed: none of its later starts takes them. A later job of the
    run tests its own.
    """
    if names := list(nodes):
        ledger.note(folder, "node failure", job, nodes=names)


def _failed(folder: Path, job: str, reason: str) -> None:
    """Record that the attempt ended by a node failure, outside of the training."""
    write_status(
        folder,
        RunStatus(status=Status.NODE_FAILURE, evidence=reason, rank=None, exit_code=1, seconds=0.0),
    )
    ledger.note(folder, "ended", job, status=Status.NODE_FAILURE, evidence=reason)


def end(
    folder: Path, code: int, env: Mapping[str, str] = os.environ, test: Tester | None = None
) -> RunStatus:
    """How the attempt ended: attempt.end(), and handle_node_failure() of it."""
    outcome = attempt.end(folder, code, env)
    nodes = env.get("SLURM_JOB_NODELIST", "")
    return handle_node_failure(folder, job_id(env), nodes, outcome, test)


def handle_node_failure(
    folder: Path, job: str, nodelist: str, outcome: RunStatus, test: Tester | None = None
) -> RunStatus:
    """The outcome of an attempt; "node failure" where one of its nodes is the reason.

    A spare takes its place (event "replaced"); else the job is requeued: SLURM itself requeues only
    what still runs.
    """
    if outcome.status is Status.STOPPED and f"by {pace.RESTART}" in outcome.evidence:
        return _replace_slow(folder, job, nodelist, outcome, test)
    # what a lost node can look like in the log
    seen = (Status.CRASHED, Status.NCCL_ERROR, Status.HANG, Status.NODE_FAILURE, Status.RENDEZVOUS)
    if outcome.status not in (*seen, Status.GPU_ERROR, Status.NETWORK, Status.KILLED):
        return outcome
    with contextlib.suppress(ValueError):  # without SLURM the outcome stays as it is
        every, trained = client.hostnames(nodelist), training_nodes(folder, job)
        nodes = [node for node in every if node not in lost_nodes(folder, job)]
        faulty = dict.fromkeys(_dead(folder, job, nodes), "cannot be reached")
        dead = bool(faulty)
        # by an Xid in the log
        reported = [node for node in nodes if node in outcome.exclude.split(",") and not faulty]
        faulty = faulty or dict.fromkeys(reported, f"is at fault ({outcome.status})")
        # by a test, while there is a spare: a GPU that has failed leaves its node alive
        if not faulty and test and len(nodes) > len(trained) > 0:
            faulty = dict(test(nodes).broken)
        _note_broken(folder, job, faulty)
        if not set(faulty) & set(
            trained or nodes
        ):  # a spare may have died: no reason for the training to fail
            return outcome
        reasons = "; ".join(f"{node} {why}" for node, why in faulty.items())
        evidence = f"{reasons}; the log: {outcome.evidence}"
        status = outcome.status if reported else Status.NODE_FAILURE
        outcome = replace(outcome, status=status, evidence=evidence, exclude=",".join(faulty))
        write_status(folder, outcome)
        if trained and len(nodes) - len(faulty) >= len(trained):
            ledger.note(
                folder,
                "replaced",
                job,
                nodes=list(faulty),
                iteration=iteration(folder),
                tested=dead,
            )
        else:
            requeue(job, len(every), list(faulty) if test or reported else [])
    return outcome


def _replace_slow(
    folder: Path, job: str, nodelist: str, outcome: RunStatus, test: Tester | None = None
) -> RunStatus:
    """Test the nodes of a run that saved and stopped itself because some made it slow, and have
    spares take over.

    Where spares are too few, the nodes that do best in the test stay.
    """
    named = {node.partition(".")[0] for node in pace.slowness(folder)[1]}
    trained, lost = training_nodes(folder, job), lost_nodes(folder, job)
    slow = [node for node in trained if node.partition(".")[0] in named]
    nodes = [node for node in client.hostnames(nodelist) if node not in lost]
    found = test(nodes) if test else node_test.Findings()
    why = {n: reason for n, (_, reason) in found.slow.items()} | found.broken
    share = {n: found.slow.get(n, (1.0, ""))[0] for n in slow}
    spares = len(nodes) - len(found.broken.keys() - {*slow}) - len(trained)
    out = sorted(slow, key=lambda n: (n not in found.broken, share[n]))[: max(spares, 0)]
    _note_broken(folder, job, dict.fromkeys([*found.broken, *out]))
    ledger.note(folder, "replaced", job, nodes=slow, iteration=iteration(folder), tested=True)
    fine = "is fine by the test" if test else "is not tested"
    stays = {n: "; it stays, no spare is left" for n in slow if n not in (*out, *found.broken)}
    said = ", ".join(f"{n} {why.get(n, fine)}{stays.get(n, '')}" for n in slow)
    evidence = f"slow with {', '.join(slow)}: {said}; {outcome.evidence}"
    return replace(outcome, evidence=evidence, exclude=",".join(out))


def only_dead_are_left(
    folder: Path, lines: Iterable[str], env: Mapping[str, str] = os.environ, within_s: float = 5.0
) -> bool:
    """Whether a step waits for dead nodes alone: True as soon as every other node has reported that
    its tasks failed.

    `lines` are srun's error messages as they come. At the first of a failed task, for which srun
    ends the step (--kill-on-bad-exit), the nodes are probed, once. Where it is True, the dead are
    in the ledger. False at the end of the lines: none was dead at the probe, or a task ended well,
    of which srun prints nothing; srun ended the step.
    """
    job, ended, dead = job_id(env), dict[str, set[int]](), list[str]()
    nodes, tasks = (
        training_nodes(folder, job) or job_nodes(env),
        int(env.get("SLURM_NTASKS_PER_NODE") or 1),
    )
    for node, ranges in (found.groups() for found in map(FAILED_TASKS.match, lines) if found):
        dead = dead if ended else unreachable(nodes, within_s)
        for first, _, last in (one.partition("-") for one in ranges.split(",")):
            ended.setdefault(node, set()).update(range(int(first), int(last or first) + 1))
        if dead and all(len(ended.get(n, ())) >= tasks for n in nodes if n not in dead):
            ledger.note(folder, "unreachable", job, nodes=dead)
            return True
    return False


def goes_on(folder: Path, job: str) -> str:
    """Which nodes of the job are replaced by spares before its next start; "" where the job ends."""
    mine = [e for e in ledger.events(folder, "started", "ended", "replaced") if e["id"] == job]
    return ", ".join(node for e in mine[-1:] if e["event"] == "replaced" for node in e["nodes"])


def _of_allocation(folder: Path, job: str, kind: str) -> list[dict[str, Any]]:
    """The ledger's events since the job has its present nodes: requeued, it keeps its id and gets
    others.
    """
    events = [e for e in ledger.events(folder) if e["id"] == job]
    starts = [(i, e.get("restarts")) for i, e in enumerate(events) if e["event"] == "started"]
    first = next((i for i, restarts in starts if restarts == starts[-1][1]), len(events))
    return [e for e in events[first:] if e["event"] == kind]


def lost_nodes(folder: Path, job: str) -> list[str]:
    """The nodes that the job has and that have failed."""
    failures = _of_allocation(folder, job, "node failure")
    return list(dict.fromkeys(node for event in failures for node in event["nodes"]))


def training_nodes(folder: Path, job: str) -> list[str]:
    """The nodes that the job chose for its last start; empty where it did not choose."""
    return next((list(e["chosen"]) for e in reversed(_of_allocation(folder, job, "nodes"))), [])


def exclude(job: str, nodes: Sequence[str]) -> None:
    """Keep a waiting job off `nodes`, and off those that it already avoids."""
    shown = client.call(["scontrol", "show", "job", "-o", job])
    # an update replaces the list
    names = ",".join(dict.fromkeys([*client.hostnames(_field(shown, "ExcNodeList")), *nodes]))
    client.call(["scontrol", "update", f"JobId={job}", f"ExcNodeList={names}"])


def requeue(job: str, nodes: int, without: Sequence[str] = ()) -> bool:
    """Put the job back into the queue for `nodes` nodes, `without` those, if its script allows it.

    SLURM ends the processes of the job at once, this one too: first by SIGTERM, and KillWait (30 s
    by default) later by SIGKILL. In between the waiting job is changed: where a node has died under
    --no-kill, it asks for one fewer.
    """
    if _field(client.call(["scontrol", "show", "job", "-o", job]), "Requeue") != "1":
        return False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client.call(["scontrol", "requeue", job])
    with contextlib.suppress(ValueError):
        if nodes > 1:
            client.call(["scontrol", "update", f"JobId={job}", f"NumNodes={nodes}"])
        if without:
            exclude(job, without)
    return True


def _field(shown: str, name: str) -> str:
    """A field of `scontrol show job -o`; "" where it is missing or "(null)"."""
    found = re.search(rf"\s{name}=([^\s(]+)", shown)
    return found[1] if found else ""


def guard(folder: Path, every_s: float) -> None:
    """Keep `guard_first_node` running on another node of the job, until this process is ended; on
    the first node.
    """
    this = python(
        "-m", "trilane", "slurm", "job", "guard", str(folder), "--every", f"{every_s:g}", "--here"
    )
    for node in itertools.cycle(reversed(job_nodes()[1:])):
        if node not in lost_nodes(folder, job_id()):
            run(
                [*node_test.step([node]), *this]
            )  # quietly: at the job's end SLURM reports that the step was cancelled
        time.sleep(every_s)


def guard_first_node(folder: Path, every_s: float) -> None:
    """Wait until SLURM has taken the job's first node from it, then requeue or cancel the job.

    Under --no-kill SLURM would let the job hold its other nodes until its time limit, without the
    script, which ran on the first: seen on SLURM 22.05.
    """
    job, first, left = job_id(), "", list[str]()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to all steps before the time limit
    while not (first and left) or first in left:
        time.sleep(every_s)
        with contextlib.suppress(ValueError):
            shown = client.call(["scontrol", "show", "job", "-o", job])
            first, left = _field(shown, "BatchHost"), client.hostnames(_field(shown, "NodeList"))
    _failed(folder, job, f"{first}, the first node, on which the job's script ran, has died")
    count = len({first, *left, *lost_nodes(folder, job)})
    _note_broken(folder, job, [first])
    if not requeue(job, count):
        client.call(["scancel", job])


def _dead(folder: Path, job: str, nodes: Sequence[str]) -> list[str]:
    """Of several nodes those found dead during the step, else those that SLURM took or whose slurmd
    does not answer.
    """
    if len(nodes) < 2:
        return []
    known = {
        node for event in _of_allocation(folder, job, "unreachable") for node in event["nodes"]
    }
    if probed := [node for node in nodes if node in known]:
        return probed
    left = (
        client.hostnames(_field(client.call(["scontrol", "show", "job", "-o", job]), "NodeList"))
        or nodes
    )
    return [node for node in nodes if node not in left] + unreachable(
        [node for node in nodes if node in left]
    )


def unreachable(nodes: Sequence[str], within_s: float = 5.0) -> list[str]:
    """The nodes whose slurmd takes no TCP connection within so many seconds; for use inside the
    job.

    All at once, after one question to the controller, which may limit requests to 2 a second. A
    refusal is tried again: slurmd may be restarting. Not found: a node that is frozen, whose kernel
    may still accept for it. Empty where none accepts: then the network of this node is at fault.
    """
    shown = client.call(["scontrol", "show", "node", "-o", ",".join(nodes)])
    usual = _field(re.sub(" += ", "=", client.call(["scontrol", "show", "config"])), "SlurmdPort")
    places = {_field(f" {line}", "NodeName"): line for line in shown.splitlines()}
    end = time.monotonic() + within_s

    def fails(node: str) -> bool:
        line = places.get(node, "")
        port = _field(line, "Port") or usual  # a node shows only a port of its own
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(OSError, ValueError):
                socket.create_connection(
                    (_field(line, "NodeAddr") or node, int(port)), left
                ).close()
                return False
            time.sleep(0.5)
        return True

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        found = [
            node for node, is_dead in zip(nodes, pool.map(fails, nodes), strict=True) if is_dead
        ]
    return found if len(found) < len(nodes) else []
