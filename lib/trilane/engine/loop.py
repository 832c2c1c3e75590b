"""The training loop: the same for every engine."""

import time
from pathlib import Path

import torch.distributed as dist

from trilane.engine.data import Feed
from trilane.engine.engines import build
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
        gbs, iterations = plan.topology.gbs, plan.run.train_iters
        begin = time.perf_counter()
        for number in range(1, iterations + 1):
            lr = learning_rate(plan.optimizer, number * gbs, iterations * gbs)
            step = self._engine.step(self._feed.microbatches((number - 1) * gbs), lr)
            end = time.perf_counter()
            if world.is_last:
                log.write(iteration(plan, number, end - begin, lr, step))
            if number == 1:
                print(memory_line(world.rank, number, world.device), flush=True)
            begin = end
        dist.barrier()
        dist.destroy_process_group()
