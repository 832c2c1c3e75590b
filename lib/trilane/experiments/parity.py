"""The parity table: engines, topologies and precisions that must reproduce the losses of one process, trained here."""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster, Gpu
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Run
from trilane.launch.local import environment
from trilane.utils.process import held_port, python
from trilane.utils.validation import shipped_json
from trilane.workspace.run_folder import STEPS, VALIDATION

ITERATIONS = 20
REFERENCE = ("truth", "truth-validation")  # the reference's files: of each iteration, and of each evaluation
# Largest |difference of loss| to the fp32 reference over all iterations.
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-3}
SHAPE = ModelShape(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512)
OPTIMIZER = Optimizer(lr=2e-3, min_lr=2e-4, warmup_samples=40, decay_samples=160)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What its rows have in common: model, optimizer and batch, and so the reference."""

    shape: ModelShape = SHAPE
    optimizer: Optimizer = OPTIMIZER
    mbs: int = 2
    gbs: int = 8

    def plan(self, machine: Cluster, folder: str, engine: str = "megatron", **topology: Any) -> Plan:
        """The task by an engine on a topology: 20 iterations over Python's standard library, prepared in `folder`.

        A tenth of the documents is held out, and evaluated after 10 iterations and at the end.
        """
        return Plan(
            label="equality",
            engine=engine,
            shape=self.shape,
            cluster=machine,
            topology=Topology(**{"mbs": self.mbs, "gbs": self.gbs, **topology}),
            data=Data(source="stdlib", folder=folder, split="90,10"),
            optimizer=self.optimizer,
            run=Run(train_iters=ITERATIONS, eval_interval=10, eval_iters=1),
        )


PLAIN = Task()
BLOOM = Task(shape=replace(SHAPE, embedding_layernorm=True, positions="alibi", activation="gelu-tanh"))
Z_LOSS = replace(BLOOM, optimizer=replace(OPTIMIZER, init_std=0.01, z_loss=0.01))
LLAMA_SHAPE = replace(SHAPE, num_key_value_heads=2, activation="swiglu", ffn_hidden_size=176, biases="none")
LLAMA_SHAPE = replace(LLAMA_SHAPE, normalization="rmsnorm", positions="rotary", tied_embeddings=False)
LLAMA_SHAPE = replace(LLAMA_SHAPE, norm_epsilon=1e-6, rotary_base=5e5)
LLAMA = Task(shape=LLAMA_SHAPE)
# A learning rate and batch that 8 bits of mantissa can follow: on the plain task, where the loss falls from 6.2 to 4.3
# in 20 iterations, bf16 differs by up to 3.8e-3 in every engine.
CALM = Task(optimizer=replace(OPTIMIZER, lr=5e-4, min_lr=5e-5), mbs=4, gbs=32)
# On the task of LLAMA fp16 skips iterations: a gradient times the first loss scale is beyond its range.
CALM_LLAMA = replace(CALM, shape=LLAMA_SHAPE)
TASKS = {
    "plain": PLAIN,
    "calm": CALM,
    "bloom": BLOOM,
    "z-loss": Z_LOSS,
    "llama": LLAMA,
    "calm llama": CALM_LLAMA,
}  # as data/equality.json calls them


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: an engine on a topology in a precision, compared with the reference of its task."""

    engine: str
    topology: str
    precision: str = "fp32"
    settings: dict[str, Any] = field(default_factory=dict)
    task: Task = PLAIN

    @property
    def label(self) -> str:
        """A readable name."""
        return f"{self.engine} {self.topology} {self.precision}"

    @property
    def bound(self) -> float:
        """Largest permitted difference of a loss from the reference."""
        return BOUNDS[self.precision]

    def plan(self, machine: Cluster, folder: str) -> Plan:
        """The row as a plan on `machine`. ValueError where the machine cannot train it."""
        return self.task.plan(machine, folder, self.engine, precision=self.precision, **self.settings)


def rows(engines: tuple[str, ...] = ENGINES) -> list[Row]:
    """The rows of data/equality.json for these engines, fp32 first."""
    every = [Row(**{**row, "task": TASKS[row["task"]]}) for row in shipped_json("equality")]
    return [row for row in every if row.engine in engines]


def machine(cards: int, bf16: bool) -> Cluster:
    """This machine for the plans of the table: `cards` GPUs, or eight processes where there are none.

    Only the supported precisions are real; nothing is predicted from the speeds.
    """
    name, kind = ("GPU", "cuda") if cards else ("CPU core", "cpu")
    known = ("memory_bytes", "memory_bytes_per_s", "fp32_flops_per_s", "fp16_flops_per_s")
    speeds: dict[str, Any] = dict.fromkeys(known, 1e9)
    gpu = Gpu(name=name, kind=kind, bf16_flops_per_s=1e9 * bf16, context_bytes=1e8, **speeds)
    rates = dict.fromkeys(("node_bytes_per_s", "network_bytes_per_s", "pcie_bytes_per_s"), 1e9)
    counts = {"gpus_per_node": cards or 8, "max_nodes": 1, "cores_per_node": 2}
    rest: dict[str, Any] = {**rates, **counts, "latency_s": 1e-5, "launch_overhead_s": 1e-5, "host_memory_bytes": 1e10}
    sources = {"all": "not measured: nothing is predicted from them"}
    return Cluster(name="this machine", gpu=gpu, sources=sources, **rest)


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """A process that trains small plans in turn (engine/worker_pool.py), and the machine that it reports."""

    process: "subprocess.Popen[str]"
    machine: Cluster

    def run(self, processes: int, folder: Path, code: int = 0) -> str:
        """Train `folder`/plan.json in `processes` (0: the reference); "", or their output where an exit code is not
        `code`.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with held_port() as port:
            self.process.stdin.write(f"{processes} {port} {folder}\n")
            self.process.stdin.flush()
            codes = self.process.stdout.readline().split()
        output = "\n".join(log.read_text(errors="replace") for log in sorted(folder.glob("*.log")))
        return "" if codes and set(codes) == {str(code)} else output or f"exit codes {' '.join(codes) or 'none'}"


@contextlib.contextmanager
def worker_pool() -> Iterator[WorkerPool]:
    """A worker pool inside the block; its workers end with it."""
    command, pipe = python("-m", "trilane.engine.worker_pool"), subprocess.PIPE
    with subprocess.Popen(command, env=environment(8), text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        yield WorkerPool(process=process, machine=machine(**json.loads(process.stdout.readline())))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one row: the largest |difference of loss| over its iterations and evaluations, and its time.

    None where it did not train.
    """

    row: Row
    max_abs_diff: float | None
    seconds: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether every loss is within the row's bound; a NaN is not."""
        return self.max_abs_diff is not None and self.max_abs_diff <= self.row.bound

    def record(self) -> dict[str, Any]:
        """The row as JSON."""
        names = {"engine": self.row.engine, "topology": self.row.topology, "precision": self.row.precision}
        return {**names, "max_abs_diff": self.max_abs_diff, "seconds": round(self.seconds, 2)}

    def line(self) -> str:
        """The row as one line of text."""
        found = self.problem or f"{self.max_abs_diff:.1e}"
        verdict = "ok" if self.ok else f"above {self.row.bound:g}" if self.max_abs_diff is not None else "failed"
        names = f"{self.row.engine:15s} {self.row.precision:5s} {self.row.topology:45s}"
        return f"{names} {found:>9s}  {self.seconds:5.1f} s  {verdict}"


class ParityRunner:
    """Trains rows in folders of their own, and for each task once the reference that they are compared with."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder, self._count = pool, folder, 0
        self._references: dict[Task, list[float]] = {}

    def result(self, row: Row) -> Result:
        """Train the row and compare its losses with the reference. ValueError where this machine cannot train it."""
        made = row.plan(self._pool.machine, str(self._folder / "data"))
        reference = self._reference(row.task)
        begin = time.monotonic()
        folder, problem = self._run(made, made.topology.gpus)
        seconds = time.monotonic() - begin
        if problem:
            return Result(row=row, max_abs_diff=None, seconds=seconds, problem=problem.strip().splitlines()[-1])
        lines = [line for name in (STEPS, VALIDATION) for line in (folder / name).read_text().splitlines()]
        losses = [json.loads(line)["lm_loss"] for line in lines]
        diffs = [abs(loss - right) for loss, right in zip(losses, reference, strict=True)]
        if any(diff != diff for diff in diffs):  # max() could ignore a NaN
            return Result(row=row, max_abs_diff=None, seconds=seconds, problem="a loss is not a number")
        return Result(row=row, max_abs_diff=max(diffs), seconds=seconds)

    def _reference(self, task: Task) -> list[float]:
        if task not in self._references:
            folder, problem = self._run(task.plan(self._pool.machine, str(self._folder / "data")), 0)
            assert not problem, problem
            steps, evaluations = (json.loads((folder / f"{name}.json").read_text()) for name in REFERENCE)
            self._references[task] = [loss for loss, _ in steps] + [loss for _, loss in evaluations]
        return self._references[task]

    def _run(self, made: Plan, processes: int) -> tuple[Path, str]:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(made.to_json()), encoding="utf-8")
        return folder, self._pool.run(processes, folder)


def verify(table: Sequence[Row]) -> Iterator[Result | str]:
    """The result of each row in turn; a line of text instead where this machine cannot train it."""
    with tempfile.TemporaryDirectory(prefix="trilane-verify-") as folder, worker_pool() as pool:
        runner = ParityRunner(pool, Path(folder))
        for row in table:
            try:
                yield runner.result(row)
            except ValueError as error:
                yield f"{row.label}: left out, {error}"


def summary(results: Sequence[Result], left_out: Sequence[str]) -> str:
    """The table as text, and how many rows are within their bound."""
    lines = [result.line() for result in results]
    held = sum(result.ok for result in results)
    return "\n".join([*lines, *left_out, f"{held} of {len(results)} rows within their bound; {len(left_out)} left out"])
