"""The training loop: the same for every engine."""

import math
import time
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.checkpoint.fingerprints import lookahead, write_loaded
from trilane.engine.checkpoint.load import find, load
from trilane.engine.checkpoint.save import Saved, Saver
from trilane.engine.checkpoint.stamp import write_json
from trilane.engine.data.loader import SampleLoader
from trilane.engine.distributed.world import World
from trilane.engine.interface import build
from trilane.engine.monitor import heartbeat
from trilane.engine.monitor.phases import DATA, EVALUATE, SAVE, phase
from trilane.engine.monitor.profile import Profiler
from trilane.engine.monitor.report import TrainingLog, Validation, iteration, memory_line
from trilane.engine.signals import Signals
from trilane.engine.stop_requests import StopRequest, StopRequests
from trilane.workspace.checkpoints import FOLDER, name_of
from trilane.workspace.continuation import extension, in_order_of
from trilane.workspace.run_folder import cut_steps
from trilane.workspace.status import RunStatus, Status, write_status


class Training:
    """A plan's engine and samples, in the initial state or that of the newest checkpoint.

    `begin` is the process's start in seconds of the monotonic clock. ValueError, on every rank, for an invalid plan or
    a checkpoint that it cannot continue from.
    """

    def __init__(self, plan: Plan, world: World, folder: Path, signals: Signals, begin: float) -> None:
        self._world, self._folder, self._begin = world, folder, begin
        self._requests = StopRequests(folder, plan.run, world, signals, begin)
        checkpoint = find(folder, plan, world)  # before a large model is built for nothing
        plan = self._plan = in_order_of(checkpoint.manifest, plan) if checkpoint else plan
        self._engine = build(plan, world)
        self._print(self._engine.path)
        if world.is_first:
            for name, settings in self._engine.settings.items():
                write_json(folder / name, settings)
        at_an_end = (parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
        self._loader = SampleLoader(plan, world, self._engine.replica, reads=any(at_an_end))
        self._done, self._saved = 0, ""
        if checkpoint:
            load(checkpoint, plan, world, self._engine)
            self._done = checkpoint.iteration
            write_loaded(folder, plan, world, self._engine, self._done, lookahead(plan, self._loader, self._done))
            own = checkpoint.path.parent == folder / FOLDER
            self._saved = checkpoint.path.name if own else ""
            self._print(f"resumes after iteration {self._done} of {checkpoint.path}")
            if text := extension(checkpoint.manifest, plan):
                self._print(text)
        self._profiler = Profiler(plan, world, folder, self._engine.modules, self._done)
        if self._profiler.note:
            self._print(self._profiler.note)
        if world.is_last:
            cut_steps(folder, self._done)
        self._saver = Saver(folder, plan, world, self._engine)

    def run(self) -> None:
        """Train to the last iteration or until a stop is requested; status.json records which.

        Writes steps.jsonl and checkpoints to the folder and Megatron's lines to the terminal.
        """
        self._train()
        heartbeat.end(self._folder)
        self._world.barrier()
        dist.destroy_process_group()

    def _train(self) -> None:
        log = TrainingLog(self._plan, self._world, self._folder)
        first = next((batch.number for batch in self._plan.batches(self._done)), 0)
        request = self._requests.now(begun=False)
        begin = time.perf_counter()
        for batch in self._plan.batches(self._done) if not request.stop else ():
            self._profiler.before(batch.number)
            begin = self._step(batch, log, begin)
            if self._profiler.after(batch.number):
                begin = time.perf_counter()  # not counted in any iteration
            if batch.number in (first, self._plan.run.goal):  # the optimizer's states exist from the second on
                print(memory_line(self._world.rank, batch.number, self._world.device), flush=True)
            if self._plan.run.evaluates_after(batch.number):
                self._evaluate(batch, log)
                begin = time.perf_counter()  # not counted in any iteration
            request = self._requests.now(writing=self._saver.writing)
            if self._saves(batch, request):
                begin = time.perf_counter()  # not counted in any iteration
            if request.stop:
                break
        log.close()
        if self._saver.begun:
            self._finish_save()
        self._end(request)
        self._saver.close()

    def _step(self, batch: Batch, log: TrainingLog, begin: float) -> float:
        """Train one batch; the time at its end."""
        heartbeat.at(batch.number)
        if batch.number > self._done + 1:
            self._print(f"skips iterations {self._done + 1} to {batch.number - 1}: next is sample {batch.first}")
        lr = self._plan.optimizer.learning_rate(batch.end, self._plan.samples)
        with phase(DATA):
            microbatches = self._loader.microbatches(batch)
        self._loader.read_ahead(next(self._plan.batches(batch.number), None))
        step = self._engine.step(microbatches, lr)
        end = time.perf_counter()
        self._done = batch.number
        log.write(iteration(self._plan, batch, end - begin, lr, step))
        return end

    def _evaluate(self, batch: Batch, log: TrainingLog) -> None:
        """The mean loss over the samples held out, the same ones after each `batch`."""
        begin, losses = time.perf_counter(), list[float]()
        with phase(EVALUATE):
            for microbatches in self._loader.validation():
                losses.append(self._engine.evaluate(microbatches))
                heartbeat.at(batch.number)
        seconds, loss = time.perf_counter() - begin, math.fsum(losses) / len(losses)
        log.evaluated(Validation(iteration=batch.number, consumed_samples=batch.end, lm_loss=loss, seconds=seconds))

    def _is_due(self, batch: Batch, request: StopRequest) -> bool:
        """Whether to save now: on request, at save_interval, or at the end of the run."""
        run, last = self._plan.run, batch.number == self._plan.run.goal
        scheduled = run.save_interval > 0 and batch.number % run.save_interval == 0
        return request.save or scheduled or (last and run.saves_at_end)

    def _saves(self, batch: Batch, request: StopRequest) -> bool:
        """Finish the last save once all ranks have written it, and begin the one that is due; whether it did either."""
        due, begun = self._is_due(batch, request), self._saver.begun
        if begun and (due or not request.writing):
            self._finish_save()
        if due:
            with phase(SAVE):
                failed = self._saver.begin(batch, lookahead(self._plan, self._loader, batch.number))
            if failed:
                self._report(failed)
        return due or (begun and not self._saver.begun)

    def _finish_save(self) -> None:
        with phase(SAVE):
            saved = self._saver.finish()
        self._report(saved)

    def _report(self, saved: Saved) -> None:
        if saved.problem:
            self._print(f"CHECKPOINT NOT SAVED: {saved}; the newest is {self._saved or 'none'}")
        else:
            self._saved = saved.name
            self._print(str(saved))

    def _end(self, request: StopRequest) -> None:
        """Print and record whether the run completed, or what stopped it and the newest checkpoint."""
        iterations, unsaved = self._plan.run.goal, self._plan.run.saves_at_end and self._saved != name_of(self._done)
        if self._done == iterations and unsaved:
            status, evidence = Status.STOPPED, f"iteration {iterations} is reached, but not saved: {self._newest()}"
            self._print(evidence)
        elif self._done == iterations:
            status, evidence = Status.COMPLETED, f"iteration {self._done} of {iterations}"
        else:
            status, evidence = (
                Status.STOPPED,
                f"stopped at iteration {self._done} by {request.reason}, {self._newest()}",
            )
            self._print(evidence)
        if self._world.is_first:
            seconds = round(time.monotonic() - self._begin, 3)
            outcome = RunStatus(status=status, evidence=evidence, rank=None, exit_code=0, seconds=seconds)
            if not write_status(self._folder, outcome):
                self._print(f"{status}: {evidence}; the disk is full, so that status.json does not record it")

    def _newest(self) -> str:
        if not self._saved:
            return "no checkpoint"
        now = self._saved == name_of(self._done)
        return f"{'saved' if now else 'the newest checkpoint is'} {FOLDER}/{self._saved}"

    def _print(self, text: str) -> None:
        if self._world.is_first:
            print(f"trilane: {text}", flush=True)
