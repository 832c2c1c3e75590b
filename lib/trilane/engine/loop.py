"""The training loop: the same for every engine."""

import time
from pathlib import Path

import torch.distributed as dist

from trilane.engine.data import Feed
from trilane.engine.engines import build
from trilane.engine.phases import DATA, phase
from trilane.engine.report import Log, iteration, memory_line
from trilane.engine.schedule import learning_rate
from trilane.engine.stamp import write_json
from trilane.engine.world import World
from trilane.plan import Plan


class Training:
    """A plan's engine in its initial state with its samples at hand. ValueError, on every rank, for a bad plan."""

    def __init__(self, plan: Plan, world: World, folder: Path) -> None:
        self._plan, self._world, self._folder = plan, world, folder
        self._engine = build(plan, world)
        if world.is_first:
            for name, settings in self._engine.settings.items():
                write_json(folder / name, settings)
        self._feed = Feed(plan, world, self._engine.replica)

    def run(self) -> None:
        """Train from the first to the last iteration; the folder gets steps.jsonl, the terminal Megatron's lines."""
        plan, world = self._plan, self._world
        log = Log(plan, self._folder)
        begin = time.perf_counter()
        for batch in plan.batches():
            lr = learning_rate(plan.optimizer, batch.end, plan.samples)
            with phase(DATA):
                microbatches = self._feed.microbatches(batch)
            step = self._engine.step(microbatches, lr)
            end = time.perf_counter()
            if world.is_last:
                log.write(iteration(plan, batch, end - begin, lr, step))
            if batch.number == 1:
                print(memory_line(world.rank, batch.number, world.device), flush=True)
            begin = end
        dist.barrier()
        dist.destroy_process_group()
