"""The parity table: every engine, topology and precision that must reproduce the losses of one process, as plans."""

from dataclasses import dataclass, field, replace
from typing import Any

from trilane.config.cluster import Cluster, Gpu
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Data, Optimizer, Plan, Run

ITERATIONS = 20


# Largest |difference of loss| to the fp32 reference over all iterations.
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-3}


SHAPE = ModelShape(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512)


OPTIMIZER = Optimizer(lr=2e-3, min_lr=2e-4, warmup_samples=40, decay_samples=160)


LAYERS = "type:transformer|embedding"


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


MEGATRON: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "PP4": {"pp": 4},
    "DP2": {"dp": 2},
    "DP2 mbs 1": {"dp": 2, "mbs": 1},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "TP2 PP2 DP2": {"tp": 2, "pp": 2, "dp": 2},
    "TP2 sequence parallel": {"tp": 2, "sequence_parallel": True},
    "PP2 interleaved": {"pp": 2, "interleaving": 2},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "DP2 distributed optimizer": {"dp": 2, "zero": 1},
    "DP2 overlapped gradients": {"dp": 2, "overlap_grad_reduce": True},
    "DP2 distributed optimizer, both overlaps": {
        "dp": 2,
        "zero": 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "TP2 PP2 DP2 distributed optimizer": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "TP2 PP2 DP2 distributed optimizer, interleaved, sequence parallel, overlapped": {
        **{"tp": 2, "pp": 2, "dp": 2, "mbs": 1, "zero": 1, "interleaving": 2},
        **{"sequence_parallel": True, "overlap_grad_reduce": True},
    },
    "PP2 embedding and head as layers": {"pp": 2, "partition": LAYERS},
    "PP2 three layers and one": {"pp": 2, "first_stage_layers": 3},
    "PP3 one layer, two, one": {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
}


ZERO: dict[str, dict[str, Any]] = {
    "ZeRO-0 DP2": {"dp": 2},
    "ZeRO-1 DP2": {"dp": 2, "zero": 1},
    "ZeRO-2 DP2": {"dp": 2, "zero": 2},
    "ZeRO-3 DP2": {"dp": 2, "zero": 3},
    "ZeRO-0 TP2": {"tp": 2},
    "ZeRO-1 TP2": {"tp": 2, "zero": 1},
    "ZeRO-2 TP2 DP2": {"tp": 2, "dp": 2, "zero": 2},
    "ZeRO-3 TP2 DP2": {"tp": 2, "dp": 2, "zero": 3},
    "ZeRO-1 TP2 DP2 sequence parallel": {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True},
    "ZeRO-3 TP2 sequence parallel, recompute full": {
        **{"tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}
    },
    "ZeRO-1 DP2 optimizer offload": {"dp": 2, "zero": 1, "offload": "optimizer"},
    "ZeRO-3 DP2 full offload": {"dp": 2, "zero": 3, "offload": "full"},
    "ZeRO-2 DP2 recompute full": {"dp": 2, "zero": 2, "recompute": "full"},
}


PIPE: dict[str, dict[str, Any]] = {
    "ZeRO-0 TP2 PP2": {"tp": 2, "pp": 2},
    "PP2": {"pp": 2, "zero": 1},
    "PP4": {"pp": 4, "zero": 1},
    "PP3 embedding and head as layers": {"pp": 3, "zero": 1, "partition": LAYERS},
    "TP2 PP2": {"tp": 2, "pp": 2, "zero": 1},
    "TP2 PP2 embedding and head as layers": {"tp": 2, "pp": 2, "zero": 1, "partition": LAYERS},
    "TP2 PP2 recompute full": {"tp": 2, "pp": 2, "zero": 1, "recompute": "full"},
    "TP2 PP2 sequence parallel, recompute full": {
        **{"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True, "recompute": "full"}
    },
    "PP2 DP2 optimizer offload": {"pp": 2, "dp": 2, "zero": 1, "offload": "optimizer"},
    "TP2 PP2 DP2": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
}


HF: dict[str, dict[str, Any]] = {
    "ZeRO-0 DP2": {"dp": 2},
    "ZeRO-2 DP2": {"dp": 2, "zero": 2},
    "ZeRO-3 DP2": {"dp": 2, "zero": 3},
    "ZeRO-3 DP2 full offload": {"dp": 2, "zero": 3, "offload": "full"},
    "ZeRO-3 DP2 recompute full": {"dp": 2, "zero": 3, "recompute": "full"},
}


TOPOLOGIES = {"megatron": MEGATRON, "deepspeed-zero": ZERO, "deepspeed-3d": PIPE, "hf-zero3": HF}


# In half precision: (engine, topology, precision, settings).
HALF: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("megatron", "TP2", "bf16", {"tp": 2}),
    ("megatron", "TP2", "fp16", {"tp": 2}),
    ("megatron", "PP2 DP2 distributed optimizer", "bf16", {"pp": 2, "dp": 2, "zero": 1}),
    ("deepspeed-zero", "ZeRO-1 DP2", "bf16", {"dp": 2, "zero": 1}),
    ("deepspeed-zero", "ZeRO-3 TP2 fp32 sums", "fp16", {"tp": 2, "zero": 3, "fp32_gradients": True}),
    ("deepspeed-3d", "TP2 PP2", "fp16", {"tp": 2, "pp": 2, "zero": 1}),
    ("deepspeed-3d", "PP2 fp32 sums", "bf16", {"pp": 2, "zero": 1, "fp32_gradients": True}),
    (
        "hf-zero3",
        "ZeRO-3 DP2 full offload, fp32 sums",
        "bf16",
        {"dp": 2, "zero": 3, "offload": "full", "fp32_gradients": True},
    ),
    ("hf-zero3", "ZeRO-3 DP2 full offload", "fp16", {"dp": 2, "zero": 3, "offload": "full"}),
)


EMBEDDING_NORM: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("megatron", "TP2 PP2 embedding LayerNorm", {"tp": 2, "pp": 2}),
    ("deepspeed-zero", "ZeRO-3 TP2 embedding LayerNorm", {"tp": 2, "zero": 3}),
    ("deepspeed-3d", "TP2 PP2 embedding LayerNorm", {"tp": 2, "pp": 2, "zero": 1}),
)


def rows(engines: tuple[str, ...] = ENGINES) -> list[Row]:
    """The rows of these engines, fp32 first."""
    every = [Row(engine=e, topology=t, settings=s) for e, named in TOPOLOGIES.items() for t, s in named.items()]
    every += [Row(engine=e, topology=t, settings=s, task=NORMED) for e, t, s in EMBEDDING_NORM]
    tasks = {"fp16": PLAIN, "bf16": CALM}
    every += [Row(engine=e, topology=t, precision=p, settings=s, task=tasks[p]) for e, t, p, s in HALF]
    return [row for row in every if row.engine in engines]


def machine(cards: int, bf16: bool) -> Cluster:
    """This machine for the plans of the table: `cards` GPUs, or eight processes where there are none.

    Only the supported precisions are real; nothing is predicted from the speeds.
    """
    gpu = Gpu(
        name="GPU" if cards else "CPU core",
        kind="cuda" if cards else "cpu",
        memory_bytes=1e9,
        memory_bytes_per_s=1e9,
        fp32_flops_per_s=1e9,
        fp16_flops_per_s=1e9,
        bf16_flops_per_s=1e9 if bf16 else 0.0,
        context_bytes=1e8,
    )
    return Cluster(
        name="this machine",
        gpu=gpu,
        gpus_per_node=cards or 8,
        max_nodes=1,
        node_bytes_per_s=1e9,
        network_bytes_per_s=1e9,
        pcie_bytes_per_s=1e9,
        latency_s=1e-5,
        cores_per_node=2,
        host_memory_bytes=1e10,
        launch_overhead_s=1e-5,
        sources={"all": "not measured: nothing is predicted from them"},
    )
