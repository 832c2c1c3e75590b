"""The test of a job's nodes before they train: each alone, then in pairs; which are broken, and
which are slow.

A rate is compared with the median of the nodes, and the medians with the cluster file. What fails
on every node is no fault of the nodes: it is reported, and nothing is left out. Of a bad pair each
meets a node of a good one; where there is none, both count. Left out: of an odd number the network
of one.
"""

import contextlib
import itertools
import json
import math
import os
import queue
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trilane.config.cluster import Cluster
from trilane.utils.process import Lines, dialogue, python

Group = tuple[str, ...]
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Why nodes cannot train (`broken`), why others are better (`slow`, with a share of the
    median), and notes.

    `refused` says why no node of the job should train: all are far below the cluster file.
    """

    broken: dict[str, str] = field(default_factory=dict)
    slow: dict[str, tuple[float, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    medians: dict[str, float] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one step found; `broken` is also why it did not end."""

    broken: str = ""
    doubtful: str = ""
    rates: dict[str, float] = field(default_factory=dict)


Run = Callable[[str, Sequence[Group]], dict[Group, Result]]


def findings(nodes: Sequence[str], run: Run, is_cpu: bool) -> Findings:
    """What `run(mode, groups)` finds out about the nodes: "alone" for all, then "pair" for
    neighbours that work.
    """
    begin = time.monotonic()
    alone = run("alone", [(node,) for node in nodes])
    broken, slow, notes = _judge(alone, is_cpu)
    if notes:
        return Findings(notes=notes)
    doubtful = {
        node: (0.99, result.doubtful) for (node,), result in alone.items() if result.doubtful
    }
    fine = [node for node in nodes if node not in broken and node not in slow]
    pairs = list(zip(fine[::2], fine[1::2], strict=False))
    paired = run("pair", pairs) if pairs else {}
    both, apart, notes = _judge(paired, is_cpu)
    suspects = [node for pair in pairs for node in pair if node in both or node in apart]
    mates = [node for pair in pairs for node in pair if node not in suspects]
    if again := list(zip(suspects, mates, strict=False)) if not notes else []:
        paired = {**paired, **run("pair", again)}
        both, apart, notes = _judge(paired, is_cpu)
        slow_pairs = _slow(
            {g: result.rates for g, result in paired.items() if not result.broken}, is_cpu
        )
        # a node that does well with one other is not the reason why a pair does not
        good = {
            node
            for g, result in paired.items()
            if not result.broken and g not in slow_pairs
            for node in g
        }
        both = {node: why for node, why in both.items() if node not in good}
        apart = {node: why for node, why in apart.items() if node not in good}
    rates = _medians(
        [result.rates for result in (*alone.values(), *paired.values()) if not result.broken]
    )
    shown = ", ".join(f"{name} {value:.3g}" for name, value in rates.items())
    summary = f"{len(nodes)} tested in {time.monotonic() - begin:.0f} s; medians: {shown}"
    return Findings(
        broken=broken | both, slow=doubtful | slow | apart, notes=(summary, *notes), medians=rates
    )


def far_below(medians: Mapping[str, float], cluster: Cluster, gpus: int) -> str:
    """Which medians are below a tenth of the cluster file's figures, on so many GPUs (0: cores) of
    a node; else "".

    A tenth: what is an order below is no matter of tuning.
    """
    used = (
        min(1.0, gpus / cluster.gpus_per_node) if gpus else 1.0
    )  # each GPU may have a network card of its own
    gpu = cluster.gpu
    matmul = (
        gpus and (gpu.bf16_flops_per_s or gpu.fp16_flops_per_s)
    ) or gpu.fp32_flops_per_s  # as the test does
    figures = {
        "matmul FLOP/s": (matmul, "are these the cards that the plan is for?"),
        "all_reduce B/s": (
            used * cluster.network_bytes_per_s,
            "does NCCL run over TCP? See the site's env",
        ),
    }
    found = [(name, medians[name], *figure) for name, figure in figures.items() if name in medians]
    lines = [
        f"{name} {value:.3g}, the cluster file has {most:.3g}: {why}"
        for name, value, most, why in found
        if 0 < value < most / 10
    ]
    return f"all nodes: {'; '.join(lines)}" if lines else ""


def _judge(
    results: Mapping[Group, Result], is_cpu: bool
) -> tuple[dict[str, str], dict[str, tuple[float, str]], tuple[str, ...]]:
    """The nodes of groups that fail, those of slow groups, and a note where all fail: then no node
    is at fault.
    """
    failed = {group: result.broken for group, result in results.items() if result.broken}
    if failed and len(failed) == len(results):
        kind = "nodes" if len(next(iter(failed))) == 1 else "pairs"
        return (
            {},
            {},
            (f"the test fails on all {kind}, so none is left out: {next(iter(failed.values()))}",),
        )
    slow = _slow(
        {group: result.rates for group, result in results.items() if group not in failed}, is_cpu
    )
    broken = {node: _with(group, node) + why for group, why in failed.items() for node in group}
    return (
        broken,
        {n: (share, _with(g, n) + why) for g, (share, why) in slow.items() for n in g},
        (),
    )


def _with(group: Group, node: str) -> str:
    return "".join(f"with {mate}: " for mate in group if mate != node)


def _medians(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each rate; of two the higher."""
    names = dict.fromkeys(name for rates in every for name in rates)
    return {
        name: statistics.median_high(rates[name] for rates in every if name in rates)
        for name in names
    }


def _slow(every: Mapping[K, Mapping[str, float]], is_cpu: bool) -> dict[K, tuple[float, str]]:
    """Of those with a rate below its limit: the share of the median that the worst of them has, and
    which it is.
    """
    medians, found = _medians(list(every.values())), dict[K, tuple[float, str]]()
    for name, rates in every.items():
        shares = [
            (value / medians[rate], rate) for rate, value in rates.items() if medians[rate] > 0
        ]
        for share, rate in sorted(pair for pair in shares if pair[0] < _least(pair[1], is_cpu))[:1]:
            found[name] = (share, f"{rate} {rates[rate]:.3g}, {share:.0%} of the median")
    return found


def _least(rate: str, is_cpu: bool) -> float:
    # What is slow, as a share of the median. GPUs of one kind in one cluster differ by 8 % on
    # average and up to 22 %, and outliers are 1.5 times slower: Sinha et al. 2022,
    # arXiv:2208.11035. A network is shared with other jobs, all pairs measure at once, and a small
    # message may cross more switches: half, and a quarter.
    least = {"matmul": 0.75, "memory": 0.75, "PCIe": 0.75, "within": 0.75, "B/s": 0.5, "1/s": 0.25}
    share = next((share for word, share in least.items() if word in rate), 0.0)
    return share / 2 if is_cpu else share  # a core is shared with whatever else the node does


def step(nodes: Sequence[str], tasks: int = 1, cores: int = 1, gpus: bool = False) -> list[str]:
    """The srun of a step on these nodes of the job, next to its other steps; it needs SLURM 20.11
    or later.

    Without --overlap it would wait until the others end. --gres=gpu:0 and --mem=0 request no GPU
    and no memory, which a step that could not end on a dead node may still hold.
    """
    own = ["--overlap", "--mem=0", *["--gres=gpu:0"] * (not gpus), f"--cpus-per-task={cores}"]
    sizes = [
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks}",
        f"--ntasks-per-node={tasks}",
    ]
    return ["srun", *own, *sizes, f"--nodelist={','.join(nodes)}"]


def tester(
    gpus: int,
    srun: Sequence[str],
    cluster: Cluster | None = None,
    env: Mapping[str, str] = os.environ,
) -> Callable[[Sequence[str]], Findings]:
    """The test of nodes of this job, on so many GPUs of each (0: a core), by a step with these
    arguments of srun.
    """

    def test(nodes: Sequence[str]) -> Findings:
        try:
            with step_of(nodes, gpus, srun, env) as run_round:
                found = findings(nodes, run_round, is_cpu=gpus == 0)
        except (
            NotStarted
        ) as error:  # srun ends the step on all nodes where it cannot start it on one
            refused: dict[str, str] = error.args[0]
            found = test([node for node in nodes if node not in refused])
            return replace(found, broken=found.broken | refused)
        far = far_below(found.medians, cluster, gpus) if cluster else ""
        # cores are shared with whatever else a node does: said, and no reason to refuse
        return (
            replace(found, notes=(*found.notes, far), refused=far if gpus else "") if far else found
        )

    return test


class NotStarted(Exception):
    """srun has not started the step on some of its nodes; args[0]: why."""


# What a task runs: a test for each line of its input. It prints a line with the end of the test's
# last; srun's --label may have put its number before. USR1, SLURM's signal before the time limit,
# would end the test of a healthy node.
TASK = """trap "" USR1
eval "staged=\\"${TRILANE_STAGED:-}\\"" # this node's copy of the environment, which parts/staging has made
[[ ! -O $staged || -L $staged || ! -e $staged/ready ]] || PATH=$staged/bin:$PATH
while read -r round; do
  said=$("$@" "$round" 2>&1 </dev/null) && code=0 || code=$?
  echo "TESTED ${round%% *} $SLURMD_NODENAME $code ${said##*$'\n'}"
done"""
TESTED = re.compile(r"TESTED (\d+) (\S+) (\d+) ?(.*)")
FAILED = re.compile(r"Task launch for .* failed on node ([^\s:]+).*")  # as srun 22.05 says it
GRACE_S = 20.0  # for the network between nodes, which the first half may not wait for
LATE = Result(broken="the test does not end in time")


@contextlib.contextmanager
def step_of(
    nodes: Sequence[str], gpus: int, srun: Sequence[str], env: Mapping[str, str]
) -> Iterator[Run]:
    """One step of srun on all nodes of the job, which runs the rounds that `findings` asks for: its
    `run`.

    A round is a line of its input: number, mode and groups as a,b; Linux passes 128 kB to a
    command, some 6,000 nodes. The tasks end with their input.
    """
    tasks, numbers = gpus or 1, itertools.count(1)
    cores = int(env.get("SLURM_CPUS_PER_TASK") or 1) * int(env.get("SLURM_NTASKS_PER_NODE") or 1)
    # a node that dies, or whose task does, leaves the others alone; SLURM's limit ends a step whose
    # parent has died
    alone = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--time=30"]
    test = python("-m", "trilane_engine.bench.node_test", str(gpus), program="python")
    command = [
        *step(nodes, tasks, max(1, cores // tasks), gpus > 0),
        *alone,
        *srun,
        "bash",
        "-c",
        TASK,
        "bash",
        *test,
    ]
    with dialogue(command, env) as (say, lines):

        def run(mode: str, groups: Sequence[Group]) -> dict[Group, Result]:
            number = next(numbers)
            say(" ".join([str(number), mode, *map(",".join, groups)]))
            return _collect(lines, number, groups, tasks)

        yield run


def _collect(lines: Lines, number: int, groups: Sequence[Group], tasks: int) -> dict[Group, Result]:
    """What the groups, of so many tasks a node, answer in this round.

    A pair that fails has ended with its last task, which another round may need. Those wait that
    take three times as long as half of the groups, and 20 s; half may take minutes to import torch
    for the first time. Where the step ends, what is missing was not tested.
    """
    group_of, left = (
        {node: group for group in groups for node in group},
        {g: len(g) * tasks for g in groups},
    )
    found, said, begin, limit_s = (
        dict[Group, Result](),
        ["it printed nothing"],
        time.monotonic(),
        600.0,
    )
    while left:
        passed = time.monotonic() - begin
        limit_s = min(limit_s, 3 * passed + GRACE_S) if 2 * len(left) <= len(groups) else limit_s
        try:
            line = lines.get(timeout=max(0.0, limit_s - passed))
        except queue.Empty:
            return dict.fromkeys(left, LATE) | found
        if not line:
            lines.put("")
            if refused := {match[1]: match[0] for match in map(FAILED.search, said) if match}:
                raise NotStarted(refused)
            return found or dict.fromkeys(
                groups, Result(broken=f"the step of the test ends: {said[-1]}")
            )
        if not (tested := TESTED.search(line)):
            said.append(line.strip()[:200])
        elif int(tested[1]) == number and (group := group_of.get(tested[2])) in left:
            left[group] -= 1
            if result := _result(int(tested[3]), tested[4]):
                found.setdefault(group, result)
            if not left[group] or (result and (len(group) == 1 or not result.broken)):
                del left[group]
    return found


def _result(code: int, said: str) -> Result | None:
    """What a test printed as its last line; None of a task that leaves this to the first of its
    group.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        values = json.loads(said)
        rates = {str(name): float(value) for name, value in values["rates"].items()}
        broken, doubtful = (", ".join(map(str, values[name])) for name in ("broken", "doubtful"))
        if not all(map(math.isfinite, rates.values())):
            broken = broken or "the test measures what is no number"
        return Result(broken=broken, doubtful=doubtful, rates=rates)
    if code == 128 + signal.SIGALRM:
        return LATE
    return (
        Result(broken=f"the test fails: {said[:200] or 'it printed nothing'} (exit code {code})")
        if code
        else None
    )
