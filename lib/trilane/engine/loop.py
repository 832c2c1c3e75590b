"""The training loop: the same for every engine."""

import time
from pathlib import Path

import torch.distributed as dist

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.checkpoint.fingerprints import outlook, write_loaded
from trilane.engine.checkpoint.load import find, load
from trilane.engine.checkpoint.save import save
from trilane.engine.checkpoint.stamp import write_json
from trilane.engine.data.loader import Feed
from trilane.engine.distributed.world import World
from trilane.engine.interface import build
from trilane.engine.lr_schedule import learning_rate
from trilane.engine.monitor import heartbeat
from trilane.engine.monitor.phases import DATA, SAVE, phase
from trilane.engine.monitor.report import Log, iteration, memory_line
from trilane.engine.signals import Signals
from trilane.engine.stop_requests import StopRequest, StopRequests
from trilane.workspace.checkpoints import FOLDER, name_of
from trilane.workspace.run_folder import cut_steps
from trilane.workspace.status import RunStatus, Status, write_status


class Training:
    """A plan's engine with its samples at hand, in its initial state or that of the newest checkpoint.

    `begin` is when the process started, in seconds of the monotonic clock. ValueError, on every rank, for a bad plan
    or a checkpoint that it cannot go on from.
    """

    def __init__(self, plan: Plan, world: World, folder: Path, signals: Signals, begin: float) -> None:
        self._plan, self._world, self._folder, self._begin = plan, world, folder, begin
        self._requests = StopRequests(folder, plan.run, world, signals, begin)
        self._engine = build(plan, world)
        if world.is_first:
            for name, settings in self._engine.settings.items():
                write_json(folder / name, settings)
        self._feed = Feed(plan, world, self._engine.replica)
        checkpoint = find(folder, plan, world)
        self._done, self._saved = 0, ""
        if checkpoint:
            load(checkpoint, plan, world, self._engine)
            self._done = checkpoint.iteration
            write_loaded(folder, plan, world, self._engine, self._done, outlook(plan, self._feed, self._done))
            own = checkpoint.path.parent == folder / FOLDER
            self._saved = checkpoint.path.name if own else ""
            self._say(f"goes on after iteration {self._done} of {checkpoint.path}")
        if world.is_last:
            cut_steps(folder, self._done)

    def run(self) -> None:
        """Train to the last iteration, or until asked to end; status.json says which of the two it was.

        The folder gets steps.jsonl and checkpoints, the terminal Megatron's lines.
        """
        log, first = Log(self._plan, self._world, self._folder), self._done + 1
        request = self._requests.now(begun=False)
        begin = time.perf_counter()
        for batch in self._plan.batches(self._done) if not request.stop else ():
            begin = self._step(batch, log, begin)
            if batch.number in (first, self._plan.run.goal):  # the optimizer's states: from the second on
                print(memory_line(self._world.rank, batch.number, self._world.device), flush=True)
            request = self._requests.now()
            if self._is_due(batch, request):
                self._save(batch)
                begin = time.perf_counter()  # no iteration pays for it
            if request.stop:
                break
        self._end(request)
        heartbeat.end()
        dist.barrier()
        dist.destroy_process_group()

    def _step(self, batch: Batch, log: Log, begin: float) -> float:
        """Train one batch; when it was done."""
        heartbeat.at(batch.number)
        lr = learning_rate(self._plan.optimizer, batch.end, self._plan.samples)
        with phase(DATA):
            microbatches = self._feed.microbatches(batch)
        step = self._engine.step(microbatches, lr)
        end = time.perf_counter()
        self._done = batch.number
        log.write(iteration(self._plan, batch, end - begin, lr, step))
        return end

    def _is_due(self, batch: Batch, request: StopRequest) -> bool:
        """A checkpoint is wanted now: somebody asks, it is its turn, or the run ends here."""
        run, last = self._plan.run, batch.number == self._plan.run.goal
        turn = run.save_interval > 0 and batch.number % run.save_interval == 0
        return request.save or turn or (last and run.saves_at_end)

    def _save(self, batch: Batch) -> None:
        with phase(SAVE):
            ahead = outlook(self._plan, self._feed, batch.number)
            saved = save(self._folder, self._plan, self._world, self._engine, batch, ahead)
        if saved.problem:
            self._say(f"CHECKPOINT NOT SAVED: {saved}; the newest is {self._saved or 'none'}")
        else:
            self._saved = saved.name
            self._say(str(saved))

    def _end(self, request: StopRequest) -> None:
        """Say whether the run is through, or what ended it and from where it can go on."""
        iterations, lacks = self._plan.run.goal, self._plan.run.saves_at_end and self._saved != name_of(self._done)
        if self._done == iterations and lacks:
            status, evidence = Status.STOPPED, f"iteration {iterations} is reached, but not saved: {self._newest()}"
            self._say(evidence)
        elif self._done == iterations:
            status, evidence = Status.COMPLETED, f"iteration {self._done} of {iterations}"
        else:
            status, evidence = (
                Status.STOPPED,
                f"stopped at iteration {self._done} by {request.reason}, {self._newest()}",
            )
            self._say(evidence)
        if self._world.is_first:
            seconds = round(time.monotonic() - self._begin, 3)
            write_status(
                self._folder, RunStatus(status=status, evidence=evidence, rank=None, exit_code=0, seconds=seconds)
            )

    def _newest(self) -> str:
        if not self._saved:
            return "no checkpoint"
        now = self._saved == name_of(self._done)
        return f"{'saved' if now else 'the newest checkpoint is'} {FOLDER}/{self._saved}"

    def _say(self, text: str) -> None:
        if self._world.is_first:
            print(f"trilane: {text}", flush=True)
