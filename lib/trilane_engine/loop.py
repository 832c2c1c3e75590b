"""The training loop: the same for every engine."""

import contextlib
import gc
import math
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.config.training import Run
from trilane.utils.files import free_bytes, read_text
from trilane.workspace.checkpoints import FOLDER, checkpoint_bytes, name_of
from trilane.workspace.continuation import since
from trilane.workspace.heartbeat import SAVE
from trilane.workspace.pace import RESTART
from trilane.workspace.run import NOT_FINITE, NOT_SAVED, cut_steps, free_space
from trilane.workspace.status import RunStatus, Status, write_status
from trilane_engine import heartbeat
from trilane_engine.backends.base import build
from trilane_engine.checkpoint.fingerprints import lookahead, write_loaded
from trilane_engine.checkpoint.load import find, load
from trilane_engine.checkpoint.save import Saved, Saver
from trilane_engine.data.samples import SampleLoader
from trilane_engine.phases import DATA, phase
from trilane_engine.report import TrainingLog, iteration, memory_line, write_json
from trilane_engine.signals import Signals
from trilane_engine.world import World

GARBAGE_INTERVAL = 10  # iterations; of what is made after the first one a collection takes 0.2 ms
# The signals of one request reach all ranks, and a rank's child and parent, within so long.
ONE_SIGNAL_S = 10.0
LOST = "values that are not finite"
MOST_LOST = 10  # iterations in a row: then the weights are lost, and each save drops a good one
RETRY_S = 60.0  # between two looks at a disk that was full


class StopRequest(NamedTuple):
    """What is requested, and its source."""

    reason: str = ""
    save: bool = False
    stop: bool = False


class StopRequests:
    """Requests to save or to stop, agreed on by all ranks: signals that reached any rank, and rank
    0's clock and files.

    The file `save` is removed once seen; where the watchdog wrote RESTART into it, the run ends
    with that save. `stop` stays, so that a chain of jobs does not continue.
    """

    # In ascending priority; every stop but the last also saves.
    requests = (
        StopRequest(),
        StopRequest("SIGUSR1", save=True),
        StopRequest("the file `save`", save=True),
        StopRequest(RESTART, save=True, stop=True),
        StopRequest("exit_duration_minutes", save=True, stop=True),
        StopRequest("the file `stop`", save=True, stop=True),
        StopRequest("SIGTERM", save=True, stop=True),
        StopRequest(LOST, stop=True),
    )

    def __init__(
        self, folder: Path, run: Run, world: World, signals: Signals, begin: float
    ) -> None:
        self._folder = folder
        self._world = world
        self._signals = signals
        self._end = math.inf
        if run.exit_duration_minutes:
            self._end = begin + 60 * run.exit_duration_minutes
        self.lost = 0  # iterations in a row
        self._agreed_s = -math.inf
        self._missing = 0
        self._retry_s = 0.0

    def now(self, begun: bool = True, writing: bool = False) -> tuple[StopRequest, bool]:
        """The highest request of any rank, and whether any is `writing`, the same on all: one
        all-reduce.

        Before the first iteration (not `begun`) only SIGTERM and the file `stop` count, not the
        clock.
        """
        highest = torch.tensor([self.pending(begun), int(writing)], device=self._world.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        number, some_write = highest.tolist()
        if self.requests[number].save:
            self._agreed_s = time.monotonic()
        return self.requests[number], bool(some_write)

    def retry(self, size: int) -> None:
        """Save again once the disk has space for so many bytes; looked at once a minute."""
        self._missing = size
        self._retry_s = time.monotonic() + RETRY_S

    def pending(self, begun: bool = True) -> int:
        """The number of the highest request on this rank; the file `save` is removed."""
        is_first = self._world.is_first
        asked = self._saves_asked() if begun and is_first else 0
        if self.lost >= MOST_LOST:
            return 7
        if self._signals.stop:
            return 6
        if is_first and (self._folder / "stop").exists():
            return 5
        if begun and is_first and time.monotonic() >= self._end:
            return 4
        # a signal that comes up to so long after all have agreed to save is the same request
        if begun and self._signals.save_s > self._agreed_s + ONE_SIGNAL_S:
            return max(asked, 1)
        return asked

    def _saves_asked(self) -> int:
        """The number of the request by the file `save`, or by a save that the disk had no space
        for.
        """
        if self._missing and time.monotonic() > self._retry_s:
            self._retry_s = time.monotonic() + RETRY_S
            if free_bytes(self._folder) > self._missing:
                return 2
        save = self._folder / "save"
        if not save.exists():
            return 0
        restarts = read_text(save, 100) == RESTART
        save.unlink(missing_ok=True)
        return 3 if restarts else 2


class Training:
    """A plan's engine and samples, in the initial state or that of the newest checkpoint."""

    def __init__(
        self, plan: Plan, world: World, folder: Path, signals: Signals, begin: float
    ) -> None:
        self._world = world
        self._folder = folder
        self._begin = begin
        self._requests = StopRequests(folder, plan.run, world, signals, begin)
        checkpoint = find(folder, plan, world)  # before a large model is built for nothing
        self._plan = plan
        self._engine = build(plan, world)
        self._print(self._engine.path)
        if world.is_first:
            for name, settings in self._engine.settings.items():
                write_json(folder / name, settings)
        self._loader = SampleLoader(plan, world, self._engine.replica)
        self._done = 0
        self._saved = ""
        self._unsaved = ""
        self._not_finite = ""
        if checkpoint:
            load(checkpoint, plan, world, self._engine)
            self._done = checkpoint.iteration
            upcoming = lookahead(plan, self._loader, self._done)
            write_loaded(folder, plan, world, self._engine, self._done, upcoming)
            if checkpoint.path.parent == folder / FOLDER:
                self._saved = checkpoint.path.name
            self._print(f"resumes after iteration {self._done} of {checkpoint.path}")
            for line in since(checkpoint.manifest, plan):
                self._print(f"changed since that checkpoint: {line}")
        if world.is_last:
            cut_steps(folder, self._done)
            (folder / NOT_FINITE).unlink(missing_ok=True)
        self._saver = Saver(folder, plan, world, self._engine)

    def run(self) -> int:
        """Train to the last iteration or until a stop is requested; status.json records which. The
        exit code: 1 where the weights are no numbers any more.
        """
        run = self._plan.run
        log = TrainingLog(self._plan, self._world, self._folder)
        first = next((batch.number for batch in self._plan.batches(self._done)), 0)
        request, _ = self._requests.now(begun=False)
        begin = time.perf_counter()
        for batch in self._plan.batches(self._done):
            if request.stop:
                break
            begin = self._step(batch, log, begin)
            is_first = batch.number == first
            if is_first or batch.number == run.goal:  # optimizer's states exist from the second on
                print(memory_line(self._world.rank, batch.number, self._world.device), flush=True)
            _collect(batch.number, is_first)
            evaluates = run.evaluates_after(batch.number)
            if evaluates:
                self._evaluate(batch, log)
            at_interval = bool(run.save_interval) and batch.number % run.save_interval == 0
            request, writing = self._requests.now(writing=self._saver.writing)
            is_last = batch.number == run.goal
            saves = at_interval or request.save or (is_last and run.saves_at_end)
            saves = saves and request.reason != LOST
            if self._save(batch, saves, writing) or evaluates:
                begin = time.perf_counter()  # what was done since is counted in no iteration
        gc.unfreeze()
        gc.enable()
        log.close()
        if self._saver.begun:
            self._report(self._saver.finish)
        code = self._end(request)
        with phase(SAVE):  # as long as the disk takes
            self._saver.keep_last()
        heartbeat.end(self._folder)
        self._world.barrier()
        dist.destroy_process_group()
        return code

    def _step(self, batch: Batch, log: TrainingLog, begin: float) -> float:
        """Train one batch; the time at its end."""
        heartbeat.at(batch.number)
        lr = self._plan.optimizer.learning_rate(batch.end, self._plan.samples)
        with phase(DATA):
            microbatches = self._loader.microbatches(batch)
        self._loader.read_ahead(next(self._plan.batches(batch.number), None))
        step = self._engine.step(microbatches, lr)
        end = time.perf_counter()
        self._done = batch.number
        # the loss scale of fp16 is searched by steps that are skipped
        scales = step.skipped and self._plan.topology.precision == "fp16"
        is_lost = not (math.isfinite(step.grad_norm) or scales)
        self._requests.lost = self._requests.lost + 1 if is_lost else 0
        if is_lost and not self._not_finite:
            norm = f"the gradient norm is {step.grad_norm}"
            self._not_finite = f"NOT FINITE since iteration {batch.number}: {norm}"
            self._print(self._not_finite)
            with contextlib.suppress(OSError):  # a full disk: the log has it
                if self._world.is_first:
                    (self._folder / NOT_FINITE).write_text(self._not_finite, encoding="utf-8")
        log.write(iteration(self._plan, batch, end - begin, lr, step), self._saver.begun)
        return end

    def _evaluate(self, batch: Batch, log: TrainingLog) -> None:
        """The mean loss over the samples held out, the same ones after each `batch`."""
        losses = []
        with phase("evaluate"):
            for microbatches in self._loader.validation():
                losses.append(self._engine.evaluate(microbatches))
                heartbeat.at(batch.number)
        log.evaluated(batch, math.fsum(losses) / len(losses))

    def _save(self, batch: Batch, due: bool, writing: bool) -> bool:
        """Finish the last save once no rank is `writing`, and begin the one that is due; whether it
        did either.
        """
        finishes = self._saver.begun and (due or not writing)
        if finishes:
            self._report(self._saver.finish)
        if due:
            upcoming = lookahead(self._plan, self._loader, batch.number)
            self._report(lambda: self._saver.begin(batch, upcoming))
        return due or finishes

    def _report(self, part: Callable[[], Saved | None]) -> None:
        """Do a part of a save, and print its result where it has one."""
        with phase(SAVE):
            saved = part()
        if saved is None:
            return
        problem = ""
        if saved.problem:
            self._unsaved = self._unsaved or f"{datetime.now():%Y-%m-%d %H:%M:%S}"
            needed = checkpoint_bytes(self._plan.shape)
            self._requests.retry(needed)
            problem = f"CHECKPOINT NOT SAVED: {saved}; the newest is {self._saved or 'none'}"
            problem += f"; since {self._unsaved}; {free_space(self._folder, needed)}"
        else:
            self._saved = saved.name
            self._unsaved = ""
            self._requests.retry(0)
        self._print(problem or str(saved))
        if self._world.is_first:
            with contextlib.suppress(OSError):  # where the disk is full only run.log has it
                (self._folder / NOT_SAVED).write_text(problem, encoding="utf-8")

    def _end(self, request: StopRequest) -> int:
        """Print and record whether the run completed, or what stopped it and the newest
        checkpoint; the exit code.
        """
        goal = self._plan.run.goal
        is_saved = self._saved == name_of(self._done)
        newest = "no checkpoint"
        if self._saved:
            newest = f"saved {FOLDER}/{self._saved}"
        status = Status.STOPPED
        if self._done == goal and (is_saved or not self._plan.run.saves_at_end):
            status = Status.COMPLETED
            evidence = f"iteration {goal} of {goal}"
        elif self._done == goal:
            evidence = f"iteration {goal} is reached, but not saved: {newest}"
        else:
            evidence = f"stopped at iteration {self._done} by {request.reason}, {newest}"
        if request.reason == LOST:
            status = Status.NAN_LOSS
        if status is not Status.COMPLETED:
            self._print(evidence)
        if self._not_finite:
            evidence += f"; {self._not_finite}"
        seconds = round(time.monotonic() - self._begin, 3)
        code = int(status is Status.NAN_LOSS)
        outcome = RunStatus(status=status, evidence=evidence, exit_code=code, seconds=seconds)
        if self._world.is_first:
            write_status(self._folder, outcome)
        return code

    def _print(self, text: str) -> None:
        if self._world.is_first:
            print(f"trilane: {text}", flush=True)


def _collect(iteration: int, is_first: bool) -> None:
    """Collect garbage in the same iterations on all ranks: one that collects when it likes makes
    all others wait.
    """
    if is_first:
        gc.disable()
        gc.collect()
        gc.freeze()  # what exists now stays to the end; to look through it takes 0.2 s
    elif iteration % GARBAGE_INTERVAL == 0:
        gc.collect()
