"""The test of a job's nodes before they train: each alone, then in pairs; which are broken, and which are slow.

One step of srun for each node or pair, all at once; none can hold up the others. A rate is compared with the median of
the nodes, so that nothing needs to be known of them. What fails on every node is no fault of the nodes: it is reported,
and nothing is left out.
"""

import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trilane.slurm import client
from trilane.slurm.nodes.node_failure import step_options
from trilane.utils.process import python

# What is slow, as a share of the median, by a word in the rate's name. GPUs of one kind in one cluster differ by 8 % on
# average and up to 22 %, and outliers are 1.5 times slower: Sinha et al. 2022, arXiv:2208.11035. A network is shared
# with other jobs, all pairs measure at once, and a small message may cross more switches: half, and a quarter.
GPU = {"matmul": 0.75, "memory": 0.75, "PCIe": 0.75, "within": 0.75, "B/s": 0.5, "1/s": 0.25}
CPU = {name: share / 2 for name, share in GPU.items()}  # a core is shared with whatever else the node does
ROUNDS, TWICE = 3, 2  # of pairs; a node is left out that is bad with two others
TEST_S = 60.0  # from its first line on
IMPORT_S = 600.0  # until its first line, while fewer than half of the steps have theirs
LATE, LATE_S = 3.0, 20.0  # then: so many times as long as the middle one, and seconds more
POLL_S = 0.1
STEP_MINUTES = math.ceil((IMPORT_S + TEST_S) / 60) + 1  # SLURM's own limit, for steps whose parent has died
# SLURM's signal before the time limit reaches every step, and would end the test of a healthy node
IGNORING_USR1 = ("bash", "-c", 'trap "" USR1; exec "$@"', "bash")

Group = tuple[str, ...]


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
    slow = doubtful | _slow({node: alone[node].rates for node in left}, CPU if is_cpu else GPU)
    pairs = _by_pairs([node for node in left if node not in slow or slow[node] == doubtful.get(node)], run, is_cpu)
    broken, slow = broken | pairs.broken, slow | pairs.slow
    medians = _medians([result.rates for result in alone.values() if result.rates])
    rates = ", ".join(f"{name} {value:.3g}" for name, value in medians.items())
    summary = f"{len(nodes)} tested in {time.monotonic() - begin:.0f} s; medians: {rates}"
    return Findings(broken=broken, slow=slow, notes=(summary, *pairs.notes))


def _by_pairs(nodes: Sequence[str], run: Run, is_cpu: bool) -> Findings:
    """The nodes that cannot exchange messages, or only slowly, with two others.

    Neighbours first, and once more the other way where all of them are bad; then those that are bad, and an odd one,
    with nodes of good pairs. With two nodes, or where no pair is good, it is not known which node it is.
    """
    results = dict[Group, Result]()
    good, bad = dict[str, bool](), {node: list[str]() for node in nodes}
    shares = dict[str, float]()
    for turn in range(ROUNDS):
        asked = [node for node in nodes if node not in good and len(bad[node]) < TWICE]
        neighbours = zip(nodes[turn::2], nodes[turn + 1 :: 2], strict=False)
        pairs = list(
            zip(list(good)[max(0, turn - 1) :], asked, strict=False) if good else neighbours if turn < TWICE else ()
        )
        results |= run("pair", pairs) if pairs else {}
        slow = _slow({"+".join(p): r.rates for p, r in results.items() if not r.broken}, CPU if is_cpu else GPU)
        for pair in pairs:
            share, why = (0.0, results[pair].broken) if results[pair].broken else slow.get("+".join(pair), (1.0, ""))
            for node, mate in (pair, pair[::-1]):
                if not why:
                    good[node] = True
                elif node not in good:
                    bad[node].append(f"with {mate}: {why}")
                    shares[node] = share
    twice_bad = {node: bad[node][-1] for node in nodes if good and node not in good and len(bad[node]) >= TWICE}
    unknown = [node for node in nodes if node not in good and node not in twice_bad and bad[node]]
    why = f"{', '.join(unknown)}: not left out, for lack of another to try: {bad[unknown[0]][0]}" if unknown else ""
    return Findings(
        broken={node: reason for node, reason in twice_bad.items() if not shares[node]},
        slow={node: (shares[node], reason) for node, reason in twice_bad.items() if shares[node]},
        notes=(why,) if why else (),
    )


def _medians(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each rate; of two the higher."""
    names = dict.fromkeys(name for rates in every for name in rates)
    return {name: statistics.median_high(rates[name] for rates in every if name in rates) for name in names}


def _slow(every: Mapping[str, Mapping[str, float]], least: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Of those with a rate below its limit: the share of the median that the worst of them has, and which it is."""
    medians, found = _medians(list(every.values())), dict[str, tuple[float, str]]()
    for name, rates in every.items():
        shares = [(value / medians[rate], rate) for rate, value in rates.items() if medians[rate] > 0]
        below = [(share, rate) for share, rate in shares if share < _limit(rate, least)]
        if below:
            share, rate = min(below)
            found[name] = (share, f"{rate} {rates[rate]:.3g}, {share:.0%} of the median")
    return found


def _limit(rate: str, least: Mapping[str, float]) -> float:
    return next((share for word, share in least.items() if word in rate), 0.0)


@dataclass(kw_only=True)
class _Step:
    process: "subprocess.Popen[bytes]"
    output: Path
    errors: Path
    begin: float
    ready: float = 0.0  # seconds until its first line


class Steps:
    """Runs the test by srun inside the job: `run` of `findings`."""

    def __init__(self, nodes: Sequence[str], gpus: int, srun: Sequence[str], env: Mapping[str, str]) -> None:
        self._order, self._gpus, self._srun, self._count = list(nodes), gpus, list(srun), 0
        self._tasks = gpus or 1
        cores = int(env.get("SLURM_CPUS_PER_TASK") or 1) * int(env.get("SLURM_NTASKS_PER_NODE") or 1)
        self._cores = max(1, cores // self._tasks)
        self._first_port = 37 * int(env["SLURM_JOB_ID"])
        self._env = dict(env)
        self._options = [o for o in step_options(client.call(["srun", "--version"])) if not _sets(o)]

    def __call__(self, mode: str, groups: Sequence[Group]) -> dict[Group, Result]:
        with tempfile.TemporaryDirectory() as place:
            steps = {group: self._start(mode, group, Path(place)) for group in groups}
            return _results(steps)

    def _start(self, mode: str, group: Group, place: Path) -> _Step:
        self._count += 1
        sizes = [f"--nodes={len(group)}", f"--ntasks={len(group) * self._tasks}", f"--ntasks-per-node={self._tasks}"]
        kept = [f"--cpus-per-task={self._cores}", "--kill-on-bad-exit=1", "--wait=5", f"--time={STEP_MINUTES}"]
        where = f"--nodelist={','.join(group)}"
        # rank 0, which the others look for, is on the first node in the order of the job
        meeting = {"MASTER_ADDR": min(group, key=self._order.index) + self._env.get("HOST_SUFFIX", "")}
        meeting["MASTER_PORT"] = str(10_000 + (self._first_port + self._count) % 20_000)
        test = [
            *IGNORING_USR1,
            *python("-m", "trilane.engine.bench.node_test", mode, str(self._gpus), program="python"),
        ]
        output, errors = place / f"{self._count}.out", place / f"{self._count}.err"
        with output.open("wb") as out, errors.open("wb") as err:
            command = ["srun", *self._options, *sizes, *kept, where, *self._srun, *test]
            env = self._env | meeting
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
        return _Step(process=process, output=output, errors=errors, begin=time.monotonic())


def _sets(option: str) -> bool:
    return option.startswith(("--gres", "--cpus-per-task"))  # unlike a step that only looks, this one needs them


def _results(steps: Mapping[Group, _Step]) -> dict[Group, Result]:
    """The result of each step, once it has ended or is too late."""
    found = dict[Group, Result]()
    while len(found) < len(steps):
        for group, step in steps.items():
            if group not in found:
                if step.process.poll() is not None:
                    found[group] = _result(step)
                elif late := _is_late(step, steps.values()):
                    _end(step.process)
                    found[group] = Result(broken=late)
        time.sleep(POLL_S)
    return found


def _is_late(step: _Step, every: Iterable[_Step]) -> str:
    """Why the step is not waited for any longer; "" while it is. A first start on all nodes may take minutes."""
    passed = time.monotonic() - step.begin
    if not step.ready and step.output.stat().st_size:
        step.ready = passed
    if step.ready:
        return f"the test does not answer within {TEST_S:.0f} s" if passed > step.ready + TEST_S else ""
    times = [other.ready or math.inf for other in every]
    middle = statistics.median_low(times)
    limit = min(IMPORT_S, LATE * middle + LATE_S)
    return f"no test starts within {limit:.0f} s" if passed > limit else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()  # srun passes it on
    try:
        process.wait(timeout=3.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _result(step: _Step) -> Result:
    """What the step printed; --label may have put the task's number before the line."""
    for line in step.output.read_text(encoding="utf-8", errors="replace").splitlines():
        brace = line.find("{")
        try:
            values = json.loads(line[brace:]) if brace >= 0 else {}
            rates = {str(name): float(value) for name, value in values["rates"].items()}
            broken, doubtful = (", ".join(map(str, values[name])) for name in ("broken", "doubtful"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if broken or all(map(math.isfinite, rates.values())):
            return Result(broken=broken, doubtful=doubtful, rates=rates)
    errors = step.errors.read_text(encoding="utf-8", errors="replace").splitlines()
    own = [line.strip() for line in errors if line.strip() and not line.startswith("srun:")] or errors[:1]
    last = own[-1] if own else "it printed nothing"
    return Result(broken=f"the test fails with exit code {step.process.returncode}: {last[:200]}")
