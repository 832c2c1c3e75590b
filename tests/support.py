"""What several tests need: a small machine, a small plan, patience."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from trilane.config.cluster import Cluster, Gpu
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import Data, Plan, Run

REPOSITORY = Path(__file__).parents[1]
BROWSER = Path("/usr/bin/chromium")


def small_cluster(cores: int = 2) -> Cluster:
    """A machine without GPUs, its numbers typed in: nothing is measured."""
    gpu = Gpu(
        name="cpu core",
        kind="cpu",
        memory_bytes=2e9,
        memory_bytes_per_s=8e9,
        fp32_flops_per_s=50e9,
        fp16_flops_per_s=1e9,
        bf16_flops_per_s=1e9,
        context_bytes=4e8,
    )
    return Cluster(
        name="local",
        gpu=gpu,
        gpus_per_node=8,
        max_nodes=1,
        node_bytes_per_s=1e9,
        network_bytes_per_s=1e9,
        pcie_bytes_per_s=1e9,
        latency_s=1e-4,
        cores_per_node=cores,
        host_memory_bytes=16e9,
        launch_overhead_s=5e-6,
        sources={"all": "typed in for a test"},
    )


def small_plan(label: str = "small", train_iters: int = 4, **topology: int) -> Plan:
    """A GPT of two layers on made-up data, trained in seconds."""
    shape = ModelShape(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=384)
    return Plan(
        label=label,
        shape=shape,
        cluster=small_cluster(),
        topology=Topology(**{"mbs": 2, "gbs": 4, **topology}),
        data=Data(source="mock", folder=os.environ.get("TRILANE_OUTPUTS", "outputs") + "/data"),
        run=Run(train_iters=train_iters),
    )


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Return as soon as `true()`; fail with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def heed_ctrl_c() -> None:
    """In a child before it begins: Ctrl-C counts, also where the tests themselves run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
