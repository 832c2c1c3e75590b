"""The training loop: the same for every engine."""

import time
from pathlib import Path

from trilane.engine.data import Feed
from trilane.engine.engines import build
from trilane.engine.report import Log, iteration, memory_line
from trilane.engine.schedule import learning_rate
from trilane.engine.world import World
from trilane.plan import Plan


def train(plan: Plan, world: World, folder: Path) -> None:
    """Train the plan from its initial state to its last iteration; the run folder gets steps.jsonl."""
    engine = build(plan, world)
    feed = Feed(plan, world, engine.replica)
    log = Log(plan, folder)
    gbs, iterations = plan.topology.gbs, plan.run.train_iters
    begin = time.perf_counter()
    for number in range(1, iterations + 1):
        lr = learning_rate(plan.optimizer, number * gbs, iterations * gbs)
        step = engine.step(feed.microbatches((number - 1) * gbs), lr)
        end = time.perf_counter()
        if world.is_last:
            log.write(iteration(plan, number, end - begin, lr, step))
        if number == 1:
            print(memory_line(world.rank, number, world.device), flush=True)
        begin = end
