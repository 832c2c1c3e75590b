"""What our loop costs: python benchmarks/engine_overhead.py, or torchrun --nproc-per-node 2 ...
--tp 2

The engine's whole iteration (data, phases, checks, loss over replicas, log, steps.jsonl) against a
bare one over the same megatron-core model, DDP and optimizer: zero, schedule, step, on samples that
are there already. Both take turns in one run, a bare one in each of the engine's, before or after
its step, so that a load from outside falls on both. With `--against plain` the other is the plain
torch GPT of gpu_mfu.py instead, with torch's AdamW, over the same microbatches: what megatron-core
and our loop cost together, on one process.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Run
from trilane.utils.files import read_text

LEFT_OUT = 5
DRAWS = 2000  # of the bootstrap
# Without torchrun: one process, and, as if there were one for each core, one thread.
ALONE = {
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": str(os.cpu_count()),
    "GOMP_SPINCOUNT": "1000",
}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Train, and print the two medians and their ratio from rank 0, as JSON with --json."""
    args = _arguments()
    terminal = os.dup(1)
    errors = os.dup(2)
    rank = int(os.environ.get("RANK", "0"))
    with _folder(rank) as folder:
        (folder / "ranks").mkdir(exist_ok=True)
        os.environ |= {"TRILANE_RANK_LOGS": str(folder / "ranks"), "RANK": str(rank)}
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        path = folder / f"plan-{rank}.json"
        path.write_text(json.dumps(_plan(args, folder).to_json()))
        try:
            found = run(path, args.against)
        except BaseException:  # the engine writes to the rank's log, which ends with the folder
            os.dup2(errors, 2)
            sys.stderr.write(read_text(folder / f"ranks/{rank}.log"))
            raise
    if rank == 0:
        os.write(terminal, (result_text(found, args.json) + "\n").encode())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="6,256,8,256,512", help="layers,hidden,heads,seq,vocab")
    for name, value in {"tp": 1, "pp": 1, "dp": 1, "mbs": 4, "gbs": 8, "pairs": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--against", default="bare", choices=("bare", "plain"))
    parser.add_argument("--fused", default="auto", choices=("auto", "on", "off"))
    parser.add_argument(
        "--timers", action="store_true", help="with phase timers, printed at each iteration"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@contextlib.contextmanager
def _folder(rank: int) -> Iterator[Path]:
    """One folder for all ranks of this host: rank 0's, found by torchrun's name of the run."""
    shared = os.environ.get("TORCHELASTIC_RUN_ID")
    if shared is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
        return
    folder = Path(tempfile.gettempdir()) / f"engine-overhead-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    yield folder


def _plan(args: argparse.Namespace, folder: Path) -> Plan:
    topology = Topology(
        tp=args.tp, pp=args.pp, dp=args.dp, mbs=args.mbs, gbs=args.gbs, precision=args.precision
    )
    run = Run(train_iters=args.pairs + LEFT_OUT + 1, timers=args.timers, fused=args.fused)
    data = Data(source="mock", folder=str(folder / "data"))
    shape = parse_shape(args.shape)
    # No number of the cluster is used; it has to have the precision.
    return Plan(
        label="overhead",
        shape=shape,
        cluster=cluster("h200"),
        topology=topology,
        data=data,
        run=run,
    )


def run(path: Path, against: str) -> dict[str, Any]:
    """Train the plan with the engine's own entry point, a bare iteration or a plain one in each of
    the engine's.
    """
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    from trilane_engine import __main__ as entry
    from trilane_engine import loop

    build, pairs = loop.build, list[Paired]()

    def paired(plan: Plan, world: Any) -> "Paired":
        engine = build(plan, world)
        other = Plain(plan).step if against == "plain" else functools.partial(bare, engine)
        pairs.append(Paired(engine, other))
        return pairs[0]

    loop.build = paired
    if code := entry.main([str(path)]):
        sys.exit(code)  # with its reason in the log
    return result(pairs[0].bare, pairs[0].whole(), pairs[0].own())


class Paired:
    """The engine, with a bare iteration in each of its steps; all else is the engine's."""

    def __init__(self, engine: Any, other: Callable[[Sequence[Any]], None]) -> None:
        self._engine, self._other = engine, other
        self.bare: dict[str, list[float]] = {name: [] for name in CLOCKS}
        self.library: dict[str, list[float]] = {name: [] for name in CLOCKS}
        self._inside = False
        for owner, name in (
            (engine, "_schedule"),
            (engine, "_zero_grad"),
            (engine._optimizer, "step"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))
        self._began: dict[str, list[float]] = {name: [] for name in CLOCKS}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, microbatches: Sequence[Any], lr: float) -> Any:
        """The engine's step, and a bare one before or after it."""
        for name, clock in CLOCKS.items():
            self._began[name].append(clock())
        first = len(self.bare["wall"]) % 2 == 0
        if first:
            self._timed(microbatches)
        for spent in self.library.values():
            spent.append(0.0)
        self._inside = True
        step = self._engine.step(microbatches, lr)
        self._inside = False
        if not first:
            self._timed(microbatches)
        return step

    def whole(self) -> dict[str, list[float]]:
        """Seconds from the beginning of each step to that of the next, the bare iteration in it
        taken off.
        """
        return {
            name: [
                after - before - bare
                for before, after, bare in zip(began, began[1:], self.bare[name], strict=False)
            ]
            for name, began in self._began.items()
        }

    def own(self) -> dict[str, list[float]]:
        """Of the whole, what was not spent in megatron-core's schedule, zeroing and optimizer: our
        loop's own.
        """
        return {
            name: [whole - spent for whole, spent in zip(values, self.library[name], strict=False)]
            for name, values in self.whole().items()
        }

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            begin = {name: clock() for name, clock in CLOCKS.items()}
            out = function(*args, **options)
            if self._inside:
                for name, clock in CLOCKS.items():
                    self.library[name][-1] += clock() - begin[name]
            return out

        return called

    def _timed(self, microbatches: Sequence[Any]) -> None:
        begin = {name: clock() for name, clock in CLOCKS.items()}
        self._other(microbatches)
        for name, clock in CLOCKS.items():
            self.bare[name].append(clock() - begin[name])


class Plain:
    """The plain torch GPT of gpu_mfu.py, with torch's AdamW and clipping."""

    def __init__(self, plan: Plan) -> None:
        import gpu_mfu
        import torch

        o = plan.optimizer
        self._model, self._clip = gpu_mfu.model(plan.shape), o.clip_grad
        weights = list(self._model.parameters())
        groups = [
            {"params": [w for w in weights if w.dim() == 2], "weight_decay": o.weight_decay},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps
        )

    def step(self, microbatches: Sequence[Any]) -> None:
        """One iteration over the microbatches."""
        import torch

        self._adam.zero_grad()
        for batch in microbatches:
            (self._model(batch.tokens, batch.labels) / len(microbatches)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._adam.step()


def bare(engine: Any, microbatches: Sequence[Any]) -> None:
    """One iteration as one would write it first: nothing is checked, logged or counted."""
    import torch

    chunks, settings = engine._chunks, engine._chunks[0].config
    timers, settings.timers = settings.timers, None

    def forward(feed: Iterator[Any], model: Any) -> Any:
        batch = next(feed)
        out = model(batch.tokens, engine._positions, None, labels=batch.labels)
        return out, lambda losses: (losses.float().mean(), {})

    for chunk in chunks:
        chunk.zero_grad_buffer()
    engine._optimizer.zero_grad()
    feeds = [iter(microbatches) for _ in chunks]
    many = len(chunks) > 1
    engine._schedule(
        forward_step_func=forward,
        data_iterator=feeds if many else feeds[0],
        model=chunks if many else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=microbatches[0].tokens.shape[1],
        micro_batch_size=microbatches[0].tokens.shape[0],
        forward_only=False,
    )
    engine._optimizer.step()
    settings.timers = timers
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def result(
    bare: dict[str, list[float]], whole: dict[str, list[float]], own: dict[str, list[float]]
) -> dict[str, Any]:
    """Medians of both, and the median ratio of a pair with its 95 % interval by the bootstrap; for
    each clock.

    `own_s` is our loop's own time, taken directly: on a loaded machine the difference of two
    medians says less.
    """
    found: dict[str, Any] = {"pairs": len(whole["wall"]) - LEFT_OUT}
    for name in CLOCKS:
        ours, theirs = whole[name][LEFT_OUT:], bare[name][LEFT_OUT : len(whole[name])]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, high = interval(ratios)
        found[name] = {
            "bare_s": statistics.median(theirs),
            "engine_s": statistics.median(ours),
            "own_s": statistics.median(own[name][LEFT_OUT:]),
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
        }
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the medians of samples drawn from `values`; the draws are the same each
    time.
    """
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[DRAWS // 40], medians[-DRAWS // 40]


def result_text(found: dict[str, Any], as_json: bool) -> str:
    """The result as a person or a program reads it."""
    if as_json:
        return json.dumps(found)
    lines = [
        f"{name}: the other {v['bare_s'] * 1e3:.2f} ms, engine {v['engine_s'] * 1e3:.2f} ms, "
        f"of it our own {v['own_s'] * 1e3:.2f} ms, ratio {v['ratio']:.4f} ({v['low']:.4f} to {v['high']:.4f})"
        for name, v in ((name, found[name]) for name in CLOCKS)
    ]
    return "\n".join([f"{found['pairs']} pairs", *lines])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # megatron-core's threads would keep it
