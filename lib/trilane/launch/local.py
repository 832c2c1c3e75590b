"""Train a plan on this machine: torchrun as a child, one readable log, and a status with its
evidence.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trilane.config.engines import require_trainable
from trilane.config.layer import layer_of
from trilane.config.plan import Plan, locate_plan, plan_from_json, read_plan, read_plan_values
from trilane.launch.outcome import Hang, failed_ranks, judge
from trilane.utils import process
from trilane.utils.files import Appended, json_object
from trilane.utils.hooks import hook
from trilane.utils.process import Child, announced, held_port, interrupt, python
from trilane.utils.tables import Json
from trilane.utils.validation import require, require_known
from trilane.workspace.continuation import require_continuable
from trilane.workspace.installation import outputs_root
from trilane.workspace.run import Run, is_started, put_aside
from trilane.workspace.status import RunStatus, Status, write_status
from trilane.workspace.study import Study

POLL_S = 0.1


def train_local(
    folder: Path,
    *,
    show_progress: bool = True,
    timeout_s: float = 7 * 86400.0,
    resume: bool = False,
) -> RunStatus:
    """Train the plan in `folder`/plan.json here and wait for it; the RunStatus, also written to
    status.json.

    Raises ValueError, before anything starts, for an invalid plan, corpus or layer, and a folder
    with an earlier run (unless `resume`: it continues from its newest checkpoint, see
    workspace/continuation.py).

    Ctrl-C ends all processes, records the status "cancelled" and is raised again; a run longer than
    `timeout_s` is ended as "timeout", one without progress for the plan's hang_timeout_s as "hang",
    with its stacks in stacks/. SIGUSR1 makes the run save, SIGTERM makes it save and end as
    "stopped" (both only in the main thread, where Python handles signals). The processes also end
    with the calling thread, even where that is killed.
    """
    folder = folder.resolve()
    plan = require_startable(folder)
    require_continuable(folder, plan)
    if resume:
        rule = "holds the file `stop`; remove it to resume"
        require(not (folder / "stop").exists(), "run folder", folder, rule)
    else:
        rule = "holds a run already; resume it, or use a new folder"
        require(not is_started(folder), "run folder", folder, rule)
    begin = time.monotonic()
    put_aside(folder, keep=True)
    outcome = _run(folder, plan, show_progress, begin, timeout_s)
    outcome = replace(outcome, seconds=_since(begin))
    write_status(folder, outcome)
    return outcome


def require_startable(plan: Path | str) -> Plan:
    """The plan; ValueError where no single machine can train it."""
    read = read_plan(plan)
    require_trainable(read)
    node = read.cluster.gpus_per_node
    rule = f"one machine starts at most the {node} processes of a node; "
    rule += f"submit job.sbatch on {read.cluster.name}"
    require(read.topology.gpus <= node, "tp x pp x dp", read.topology.gpus, rule)
    return read


def train(plan: Plan | Path | str, layer: Any = None, *, study: str = "python", **run: Any) -> Run:
    """Train the plan here, in a run folder of the study; one that has completed there is not
    trained again.

        train(plan, layer=MyLayer, train_iters=20).status

    `layer` is a class of your own for each of its layers, or FILE.py:CLASS (docs/engine.md). `run`
    sets fields of the plan's run. ValueError as train_local() and for what cannot be trained.
    """
    plan = read_plan(plan)
    for name in run:
        require_known("train", name, [f.name for f in fields(plan.run)])
    own = layer_of(layer) if layer else plan.layer
    label = plan.label
    if own and own != plan.layer:
        label += f"-{own.kind}"
    data = replace(plan.data, folder=str(outputs_root() / "data"))
    plan = replace(plan, label=label, layer=own, data=data, run=replace(plan.run, **run))
    text = json.dumps(plan.to_json(), indent=1) + "\n"
    folder, is_completed = Study.open(study).run_folder(plan, {"plan.json": text})
    if not is_completed:
        train_local(folder)
    return Run(folder)


def _run(
    folder: Path, plan: Plan, show_progress: bool, begin: float, timeout_s: float
) -> RunStatus:
    """Prepare the data and train; how it ended. Ctrl-C is recorded, and raised."""
    start = {"TRILANE_START": secrets.token_hex(8)}
    try:
        prepare_data(folder / "plan.json")
        monitor = hook("monitor")(folder, plan, start)
        with contextlib.closing(monitor), torchrun(folder, plan, start) as child:
            with forwarding_signals(child):
                code = follow(child, folder, plan, show_progress, begin + timeout_s, monitor)
            outcome = judge(folder, code, monitor.iteration)
            return monitor.corrected(outcome, set(failed_ranks(folder)))
    except KeyboardInterrupt:
        cancelled = RunStatus(status=Status.CANCELLED, evidence="Ctrl-C", seconds=_since(begin))
        write_status(folder, cancelled)
        raise
    except TimeoutError:
        return RunStatus(status=Status.TIMEOUT, evidence=f"longer than {timeout_s:.0f} s")
    except Hang as hang:
        (outcome,) = hang.args
        return outcome


def environment(processes: int) -> dict[str, str]:
    """The environment of `processes` children: cores divided among them, gloo on the loopback, this
    trilane first.
    """
    cores = len(process.core_numbers())
    paths = [str(Path(__file__).parents[2])]
    paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    changes = {
        # Waiting threads spin for milliseconds by default; where other processes need the core, an
        # iteration then takes ten times as long. libgomp itself takes this value once threads
        # outnumber cores.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        **announced(),
    }
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    changes |= dict.fromkeys(names, str(max(1, cores // processes)))
    return process.environment(changes)


def prepare_data(plan: Path) -> list[str]:
    """Prepare the corpus of a plan's file in a child process (it may import torch), and try out its
    own layer; the prefixes of its pairs. ValueError with the child's last line where it fails.
    """
    done = process.run(python("-m", "trilane_engine.data.corpus", str(plan)), environment(1))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        # of a mistake in the plan it is the message
        is_message = done.returncode == 2
        raise ValueError(last if is_message else f"data: could not be prepared ({last})")
    return done.stdout.splitlines()


@contextlib.contextmanager
def torchrun(folder: Path, plan: Plan, start: dict[str, str]) -> Iterator[Child]:
    """torchrun over the plan's processes; ended, with its workers, after the block.

    `start` names this start of the run in its ranks' environment.
    """
    ranks = folder / "ranks"
    ranks.mkdir(exist_ok=True)
    processes = plan.topology.gpus
    command = python("-m", "trilane_engine.torchrun", str(ranks / "failures.json"))
    env = {**environment(processes), "TRILANE_RANK_LOGS": str(ranks), **start}
    with held_port() as port, (ranks / "torchrun.log").open("ab") as log:
        command += ["--nnodes=1", f"--nproc-per-node={processes}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        command += ["--module", "trilane_engine", str(folder / "plan.json")]
        # in its own process group: Ctrl-C reaches this process alone, which then ends the others in
        # order
        child = process.start(command, env, stdout=log, stderr=log, process_group=0)
        try:
            yield child
        finally:
            interrupt(child)


@contextlib.contextmanager
def forwarding_signals(child: Child) -> Iterator[None]:
    """Forward SIGUSR1 and SIGTERM to the child inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGUSR1, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, _: child.send_signal(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 3)


def run_folder(plan: Path | str, reuse: bool = False) -> Path:
    """The folder in which a plan runs: that of its plan.json, or a new one called like a file of
    another name.

    `plan` as read_plan() takes it. ValueError for a file without a plan, and for a folder that
    exists, unless it holds the same plan and may be used again (`reuse`).
    """
    file, name = locate_plan(plan)
    if file.name == "plan.json" and not name:
        return file.parent
    values = read_plan_values(plan)
    folder = file.with_name(f"{file.stem}-{name}" if name else file.stem)
    if reuse and (folder / "plan.json").is_file() and Run(folder).plan == plan_from_json(values):
        return folder
    rule = f"would run in {folder}, which exists; move one of them"
    require(not folder.exists(), "plan", plan, rule)
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return folder


def follow(
    child: Child,
    folder: Path,
    plan: Plan,
    show_progress: bool,
    deadline: float,
    monitor: Any,
) -> int:
    """Copy the ranks' output to run.log until the child ends; its exit code.

    Raises TimeoutError after `deadline` (seconds of the monotonic clock), and what the check() of
    the `monitor`, called each poll, raises; the child is ended then. Its news() are lines of the
    log.
    """
    ranks = [Tail(folder / f"ranks/{rank}.log") for rank in range(plan.topology.gpus)]
    steps = Tail(folder / "steps.jsonl")
    log = Appended(folder / "run.log")
    log.write(b"")  # it exists from the start

    def copy(rest: bool = False) -> None:
        text = ""
        for tail in ranks:
            text += "".join(f"{line}\n" for line in tail.lines(rest))
        if text:
            log.write(text.encode())

    try:
        while True:
            code = child.poll()
            copy()
            for line in steps.lines():
                step = json_object(line)
                if step and show_progress:
                    print_fifth(plan, step)
            if code is not None:
                return code
            monitor.check()
            if text := monitor.news():
                log.write(f"trilane: {text}\n".encode())
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_S)
    finally:
        # torchrun ends its workers without a save; until they end the ranks train on, and print it
        interrupt(child)
        copy(rest=True)


def print_fifth(plan: Plan, step: Json) -> None:
    """Print a record of steps.jsonl to stderr, five of a run."""
    done = step["iteration"]
    goal = plan.run.train_iters
    if done % max(1, goal // 5) == 0:
        facts = f"loss {step['lm_loss']:.3f}, {step['sec_per_it']:.3f} s/it"
        print(f"{plan.label}: {done}/{goal}, {facts}", file=sys.stderr, flush=True)


class Tail:
    """New lines of a file that another process writes, and that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def lines(self, rest: bool = False) -> list[str]:
        """The whole lines added since the last call; with `rest` also an unfinished last one."""
        # opened at each call: on NFS only this asks the server for what other hosts added
        try:
            with self._path.open("rb") as file:
                # replaced by a shorter one: a resumed run cuts steps.jsonl
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                    self._rest = b""
                file.seek(self._at)
                new = file.read()
        except (FileNotFoundError, IsADirectoryError):
            new = b""
        self._at += len(new)
        whole, end, self._rest = (self._rest + new).rpartition(b"\n")
        if rest:
            whole += end + self._rest
            self._rest = b""
        return whole.decode("utf-8", "replace").splitlines()
