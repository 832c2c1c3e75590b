"""The parity table: every engine, topology and precision that must reproduce the losses of one process, as plans."""

from dataclasses import dataclass, field, replace
from typing import Any

from trilane.config.cluster import Cluster, Gpu
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Data, Optimizer, Plan, Run
from trilane.utils.validation import shipped_json

ITERATIONS = 20
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
        """The task by an engine on a topology: 20 iterations over Python's standard library, prepared in `folder`."""
        return Plan(
            label="equality",
            engine=engine,
            shape=self.shape,
            cluster=machine,
            topology=Topology(**{"mbs": self.mbs, "gbs": self.gbs, **topology}),
            data=Data(source="stdlib", folder=folder),
            optimizer=self.optimizer,
            run=Run(train_iters=ITERATIONS),
        )


PLAIN = Task()
NORMED = Task(shape=replace(SHAPE, embedding_layernorm=True))  # as BLOOM
# A learning rate and batch that 8 bits of mantissa can follow: on the plain task, where the loss falls from 6.2 to 4.3
# in 20 iterations, bf16 differs by up to 3.8e-3 in every engine.
CALM = Task(optimizer=replace(OPTIMIZER, lr=5e-4, min_lr=5e-5), mbs=4, gbs=32)
TASKS = {"plain": PLAIN, "normed": NORMED, "calm": CALM}  # as data/equality.json calls them


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
