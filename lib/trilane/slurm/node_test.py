"""The test of a job's nodes before they train: each alone, then in pairs; which are broken, and which are slow.

One step of srun for each node or pair, all at once; none can hold up the others. A rate is compared with the median of
the nodes, so that nothing needs to be known of them. What fails on every node is no fault of the nodes: it is reported,
and nothing is left out.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trilane.utils.process import python

# What is slow, as a share of the median, by a word in the rate's name. GPUs of one kind in one cluster differ by 8 % on
# average and up to 22 %, and outliers are 1.5 times slower: Sinha et al. 2022, arXiv:2208.11035. A network is shared
# with other jobs, all pairs measure at once, and a small message may cross more switches: half, and a quarter.
LEAST = {"matmul": 0.75, "memory": 0.75, "PCIe": 0.75, "within": 0.75, "B/s": 0.5, "1/s": 0.25}

Group = tuple[str, ...]
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Why nodes cannot train (`broken`), why others are better (`slow`, with a share of the median), and notes."""

    broken: dict[str, str] = field(default_factory=dict)
    slow: dict[str, tuple[float, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one step found; `broken` is also why it did not end."""

    broken: str = ""
    doubtful: str = ""
    rates: dict[str, float] = field(default_factory=dict)


Run = Callable[[str, Sequence[Group]], dict[Group, Result]]


def findings(nodes: Sequence[str], run: Run, is_cpu: bool) -> Findings:
    """What `run(mode, groups)` finds out about the nodes: "alone" for all, then "pair" for those that work well."""
    begin = time.monotonic()
    alone = {node: result for (node,), result in run("alone", [(node,) for node in nodes]).items()}
    broken = {node: result.broken for node, result in alone.items() if result.broken}
    if len(broken) == len(nodes):
        return Findings(notes=(f"the test fails on all nodes, so none is left out: {next(iter(broken.values()))}",))
    left = [node for node in nodes if node not in broken]
    doubtful = {node: (0.99, alone[node].doubtful) for node in left if alone[node].doubtful}
    slow = _slow({node: alone[node].rates for node in left}, is_cpu)
    pairs = _by_pairs([node for node in left if node not in slow], run, is_cpu)
    rates = ", ".join(f"{name} {value:.3g}" for name, value in _medians([alone[n].rates for n in left]).items())
    summary = f"{len(nodes)} tested in {time.monotonic() - begin:.0f} s; medians: {rates}"
    return Findings(broken=broken | pairs.broken, slow=doubtful | slow | pairs.slow, notes=(summary, *pairs.notes))


def _by_pairs(nodes: Sequence[str], run: Run, is_cpu: bool) -> Findings:
    """The nodes that cannot exchange messages, or only slowly, with one that can with another.

    Neighbours first, and shifted by one where all of them are bad; then each node that is in doubt with one of a good
    pair. With two nodes, or where no pair is good, it is not known which node it is.
    """
    good, results = dict[str, bool](), dict[Group, Result]()
    bad = {node: dict[str, tuple[float, str]]() for node in nodes}  # with which others
    for turn in range(3):
        in_doubt = [node for node in nodes if node not in good and not bad[node].keys() & good.keys()]
        neighbours = zip(nodes[turn::2], nodes[turn + 1 :: 2], strict=False) if turn < 2 else ()
        pairs = list(zip(good, in_doubt, strict=False) if good else neighbours)
        results |= run("pair", pairs) if pairs else {}
        slow = _slow({pair: result.rates for pair, result in results.items() if not result.broken}, is_cpu)
        for pair in pairs:
            share, why = (0.0, results[pair].broken) if results[pair].broken else slow.get(pair, (1.0, ""))
            for node, mate in (pair, pair[::-1]):
                if why:
                    bad[node][mate] = share, f"with {mate}: {why}"
                else:
                    good[node] = True
    found = {n: why for n in nodes if n not in good for mate, why in bad[n].items() if mate in good}
    unknown = [node for node in nodes if bad[node] and node not in good and node not in found]
    first = next(iter(bad[unknown[0]].values()))[1] if unknown else ""
    why = f"{', '.join(unknown)}: kept, with no other node to pair with: {first}"
    return Findings(
        broken={node: why for node, (share, why) in found.items() if not share},
        slow={node: (share, why) for node, (share, why) in found.items() if share},
        notes=(why,) if unknown else (),
    )


def _medians(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each rate; of two the higher."""
    names = dict.fromkeys(name for rates in every for name in rates)
    return {name: statistics.median_high(rates[name] for rates in every if name in rates) for name in names}


def _slow(every: Mapping[K, Mapping[str, float]], is_cpu: bool) -> dict[K, tuple[float, str]]:
    """Of those with a rate below its limit: the share of the median that the worst of them has, and which it is."""
    medians, found = _medians(list(every.values())), dict[K, tuple[float, str]]()
    for name, rates in every.items():
        shares = [(value / medians[rate], rate) for rate, value in rates.items() if medians[rate] > 0]
        for share, rate in sorted(pair for pair in shares if pair[0] < _least(pair[1], is_cpu))[:1]:
            found[name] = (share, f"{rate} {rates[rate]:.3g}, {share:.0%} of the median")
    return found


def _least(rate: str, is_cpu: bool) -> float:
    share = next((share for word, share in LEAST.items() if word in rate), 0.0)
    return share / 2 if is_cpu else share  # a core is shared with whatever else the node does


def step(nodes: Sequence[str], tasks: int = 1, cores: int = 1, gpus: bool = False) -> list[str]:
    """The srun of a step on these nodes of the job, next to its other steps; it needs SLURM 20.11 or later.

    Without --overlap it would wait until the others end. --gres=gpu:0 and --mem=0 request no GPU and no memory, which
    a step that could not end on a dead node may still hold.
    """
    own = ["--overlap", "--mem=0", *["--gres=gpu:0"] * (not gpus), f"--cpus-per-task={cores}"]
    sizes = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes) * tasks}", f"--ntasks-per-node={tasks}"]
    return ["srun", *own, *sizes, f"--nodelist={','.join(nodes)}"]


@dataclass(frozen=True, kw_only=True)
class _Step:
    process: "subprocess.Popen[bytes]"
    output: Path
    errors: Path


def tester(gpus: int, srun: Sequence[str], env: Mapping[str, str] = os.environ) -> Callable[[Sequence[str]], Findings]:
    """The test of nodes of this job, on so many GPUs of each (0: a core), by steps with these arguments of srun."""
    return lambda nodes: findings(nodes, steps(nodes, gpus, srun, env), is_cpu=gpus == 0)


def steps(nodes: Sequence[str], gpus: int, srun: Sequence[str], env: Mapping[str, str]) -> Run:
    """Runs the test by srun inside the job: `run` of `findings`."""
    tasks, ports = gpus or 1, itertools.count(37 * int(env["SLURM_JOB_ID"]))
    cores = int(env.get("SLURM_CPUS_PER_TASK") or 1) * int(env.get("SLURM_NTASKS_PER_NODE") or 1)
    # SLURM's signal before the time limit reaches every step, and would end the test of a healthy node
    test = ["bash", "-c", 'trap "" USR1; exec "$@"', "bash"]
    test += python("-m", "trilane.engine.bench.node_test", "MODE", str(gpus), program="python")

    def start(mode: str, group: Group, place: Path) -> _Step:
        # SLURM's own limit, in minutes, ends steps whose parent has died
        ends = ["--kill-on-bad-exit=1", "--wait=5", "--time=12"]
        head = [*step(group, tasks, max(1, cores // tasks), gpus > 0), *ends, *srun]
        # rank 0, which the others look for, is on the first node in the order of the job
        first = min(group, key=list(nodes).index) + env.get("HOST_SUFFIX", "")
        meeting = {"MASTER_ADDR": first, "MASTER_PORT": str(10_000 + next(ports) % 20_000)}
        output, errors = (place / f"{'+'.join(group)}.{name}" for name in ("out", "err"))
        with output.open("wb") as out, errors.open("wb") as err:
            command = [*head, *(mode if word == "MODE" else word for word in test)]
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = subprocess.Popen(command, **streams, env={**env, **meeting})
        return _Step(process=process, output=output, errors=errors)

    def run(mode: str, groups: Sequence[Group]) -> dict[Group, Result]:
        with tempfile.TemporaryDirectory() as place:
            return _results({group: start(mode, group, Path(place)) for group in groups})

    return run


def _results(steps: Mapping[Group, _Step]) -> dict[Group, Result]:
    """The result of each step, once it has ended or is too late."""
    found, begin, half_s = dict[Group, Result](), time.monotonic(), 0.0
    while len(found) < len(steps):
        passed = time.monotonic() - begin
        for group, one in steps.items():
            if group not in found and one.process.poll() is not None:
                found[group] = _result(one)
            elif group not in found and passed > limit_s(half_s):
                one.process.terminate()  # srun passes it on
                found[group] = Result(broken=f"the test does not end within {passed:.0f} s")
        half_s = half_s or (passed if 2 * len(found) >= len(steps) else 0.0)
        time.sleep(0.1)
    return found


def limit_s(half_s: float) -> float:
    """Seconds that a step may take, of which half of all took `half_s`; 0: not yet half of them have ended.

    The first import of torch on all nodes may take minutes, from one file system.
    """
    return min(600.0, 3 * half_s + 60.0) if half_s else 600.0


def _result(done: _Step) -> Result:
    """What the step printed; --label may have put the task's number before the line."""
    for line in done.output.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            values = json.loads(line[line.index("{") :])
            rates = {str(name): float(value) for name, value in values["rates"].items()}
            broken, doubtful = (", ".join(map(str, values[name])) for name in ("broken", "doubtful"))
            if broken or all(map(math.isfinite, rates.values())):
                return Result(broken=broken, doubtful=doubtful, rates=rates)
    errors = done.errors.read_text(encoding="utf-8", errors="replace").splitlines()
    own = [line.strip() for line in errors if line.strip() and not line.startswith("srun:")] or errors[:1]
    last = own[-1] if own else "it printed nothing"
    return Result(broken=f"the test fails with exit code {done.process.returncode}: {last[:200]}")
