"""The test of a job's nodes before they train: which are broken, and which are slow.

A rate is compared with the median of the nodes. What fails on every node is no fault of the nodes:
it is reported, and nothing is left out. Left out: the network between nodes.
"""

import json
import math
import os
import queue
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from trilane.utils.frozen import frozen
from trilane.utils.process import Lines, printed_lines, python

# GPUs of one kind in one cluster differ by 8 % on average and up to 22 %, and outliers are 1.5
# times slower: Sinha et al. 2022, arXiv:2208.11035.
LEAST_SHARE = 0.75
LEAST_SHARE_OF_CORES = LEAST_SHARE / 2  # a core is shared with whatever else the node does
GRACE_S = 20.0  # for the slower half of the nodes, which may read torch from a busy disk
LIMIT_S = 600.0  # half of the nodes may take minutes to import torch for the first time


@frozen
class Findings:
    """Why nodes cannot train (`broken`), why others are better (`slow`, with a share of the
    median), and notes.
    """

    broken: dict[str, str] = field(default_factory=dict)
    slow: dict[str, tuple[float, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# tests these nodes of the job
Tester = Callable[[Sequence[str]], Findings]


@frozen
class Result:
    """What the test of a node found; `broken` is also why it did not end."""

    broken: str = ""
    rates: dict[str, float] = field(default_factory=dict)


LATE = Result(broken="the test does not end in time")


class NotStarted(Exception):
    """srun has not started the step on some of its nodes; the argument has why, by node."""


def findings(results: Mapping[str, Result], is_cpu: bool) -> Findings:
    """What the results of all nodes show: which are broken, and which are slow."""
    broken = {node: result.broken for node, result in results.items() if result.broken}
    if broken and len(broken) == len(results):
        why = next(iter(broken.values()))
        return Findings(notes=(f"the test fails on all nodes, so none is left out: {why}",))
    working = {node: result for node, result in results.items() if not result.broken}
    rates: dict[str, list[float]] = {}
    for result in working.values():
        for name, rate in result.rates.items():
            rates.setdefault(name, []).append(rate)
    least_share = LEAST_SHARE_OF_CORES if is_cpu else LEAST_SHARE
    slow: dict[str, tuple[float, str]] = {}
    for node, result in working.items():
        for name, rate in result.rates.items():
            share = rate / statistics.median_high(rates[name])  # of two the higher
            if share < least_share and share < slow.get(node, (1.0, ""))[0]:
                slow[node] = (share, f"{name} {rate:.3g}, {share:.0%} of the median")
    return Findings(broken=broken, slow=slow, notes=(f"{len(results)} tested",))


def step(nodes: Sequence[str], tasks: int = 1, cores: int = 1, gpus: bool = False) -> list[str]:
    """The srun of a step on these nodes of the job, next to its other steps; it needs SLURM 20.11
    or later.

    Without --overlap it would wait until the others end. --gres=gpu:0 and --mem=0 request no GPU
    and no memory, which a step that could not end on a dead node may still hold.
    """
    command = ["srun", "--overlap", "--mem=0"]
    if not gpus:
        command.append("--gres=gpu:0")
    command += [f"--cpus-per-task={cores}", f"--nodes={len(nodes)}"]
    command += [f"--ntasks={len(nodes) * tasks}", f"--ntasks-per-node={tasks}"]
    return [*command, f"--nodelist={','.join(nodes)}"]


def tester(gpus: int | None, srun: Sequence[str]) -> Tester:
    """The test of nodes of this job, on so many GPUs of each (0: a core), by a step with these
    arguments of srun; with None only whether they see the run folder.
    """

    def test(nodes: Sequence[str]) -> Findings:
        try:
            results = run_step(nodes, gpus, srun)
        except NotStarted as error:
            # srun ends the step on all nodes where it cannot start it on one
            (refused,) = error.args
            others = test([node for node in nodes if node not in refused])
            return replace(others, broken=others.broken | refused)
        return findings(results, is_cpu=not gpus)

    return test


# What a task runs: the test. It prints a line with the end of the test's last; srun's --label may
# have put its number before. USR1, SLURM's signal before the time limit, would end the test of a
# healthy node.
TASK = """trap "" USR1
[[ -r plan.json ]] || set -- sh -c 'echo "it does not see the run folder"; exit 1'
output=$("$@" 2>&1 </dev/null) && code=0 || code=$?
echo "TESTED $SLURMD_NODENAME $code ${output##*$'\n'}"
"""
TESTED = re.compile(r"TESTED (\S+) (\d+) ?(.*)")
FAILED = re.compile(r"Task launch for .* failed on node ([^\s:]+).*")  # as srun 22.05 prints it


def run_step(nodes: Sequence[str], gpus: int | None, srun: Sequence[str]) -> dict[str, Result]:
    """The result of each node, by one step of srun on all; NotStarted where it is refused."""
    env = os.environ
    tasks = gpus or 1
    cores = int(env.get("SLURM_CPUS_PER_TASK") or 1) * int(env.get("SLURM_NTASKS_PER_NODE") or 1)
    command = step(nodes, tasks, max(1, cores // tasks), bool(gpus))
    # a node that dies, or whose task does, leaves the others alone; SLURM's limit (minutes) ends a
    # step whose parent has died
    command += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--time=30", *srun]
    test = python("-m", "trilane_engine.bench.node_test", str(gpus), program="python")
    if gpus is None:
        test = ["echo", '{"broken": [], "rates": {}}']
    with printed_lines([*command, "bash", "-c", TASK, "bash", *test], env) as lines:
        return _collect(lines, nodes, tasks)


def _collect(lines: Lines, nodes: Sequence[str], tasks: int) -> dict[str, Result]:
    """The results of nodes, of so many tasks each.

    Those are late that take three times as long as half of the nodes, and GRACE_S. Where the step
    ends, what is missing was not tested.
    """
    tasks_left = dict.fromkeys(nodes, tasks)
    results: dict[str, Result] = {}
    printed = ["it printed nothing"]
    begin = time.monotonic()
    limit_s = LIMIT_S
    while tasks_left:
        passed_s = time.monotonic() - begin
        if 2 * len(tasks_left) <= len(nodes):
            limit_s = min(limit_s, 3 * passed_s + GRACE_S)
        try:
            line = lines.get(timeout=max(0.0, limit_s - passed_s))
        except queue.Empty:
            return dict.fromkeys(tasks_left, LATE) | results
        if not line:  # the step has ended
            refused = {match[1]: match[0] for match in map(FAILED.search, printed) if match}
            if refused:
                raise NotStarted(refused)
            ended = Result(broken=f"the step of the test ends: {printed[-1]}")
            return results or dict.fromkeys(nodes, ended)
        tested = TESTED.search(line)
        if not tested:
            printed.append(line.strip()[:200])
            continue
        node = tested[1]
        result = _result(int(tested[2]), tested[3])
        if result:
            results.setdefault(node, result)
        if node in tasks_left:
            tasks_left[node] -= 1
            if result or not tasks_left[node]:
                del tasks_left[node]
    return results


def _result(code: int, last_line: str) -> Result | None:
    """What a test printed as its last line; None of a task that leaves this to its node's first."""
    try:
        values = json.loads(last_line)
        rates = {str(name): float(value) for name, value in values["rates"].items()}
        broken = ", ".join(map(str, values["broken"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        if code == 128 + signal.SIGALRM:  # bash: a signal's number above 128
            return LATE
        if not code:
            return None
        why = last_line[:200] or "it printed nothing"
        return Result(broken=f"the test fails: {why} (exit code {code})")
    if not all(0 < rate < math.inf for rate in rates.values()):  # NaN is neither
        broken = broken or "the test measures what is no number"
    return Result(broken=broken, rates=rates)
