"""What several tests need: a small machine, a small plan, patience."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trilane.config.cluster import Cluster, Gpu
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Run
from trilane.utils.validation import to_mapping

REPOSITORY = Path(__file__).parents[1]
BROWSER = Path("/usr/bin/chromium")
# the demo of the tests
SMALL = ["-p", "seconds_per_iteration", "0.02", "-p", "lr", "2e-3", "-p", "runs", "1"]
IN_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BROWSER.exists() and not os.environ.get("CI"),
        reason=f"{BROWSER} is not installed (Debian: apt install chromium)",
    ),
]


def uncounted() -> dict[str, str]:
    """The environment without coverage, for what takes minutes: it costs a quarter, and other tests
    run those lines.
    """
    return {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")
    }


def in_browser(test: Any) -> Any:
    """The test with the marks of one that needs the browser."""
    for mark in IN_BROWSER:
        test = mark(test)
    return test


def plant_modules(folder: Path) -> Path:
    """A file of `folder` that appears once one of its own json.py, torch.py, ... is run in place of
    the real one.
    """
    trace = folder.resolve() / "was-run"
    for name in ("json", "typing", "torch", "numpy", "click"):
        code = (
            f"open({str(trace)!r}, 'a').write(__name__)\nraise ImportError('this is not {name}')\n"
        )
        (folder / f"{name}.py").write_text(code)
    return trace


class Later:
    """A module that is imported at its first use: each worker of a test run collects all tests, and
    one needs torch.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest asks each name of a module whether it is a test
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def small_cluster() -> Cluster:
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
        cores_per_node=2,
        host_memory_bytes=16e9,
        launch_overhead_s=5e-6,
        sources={"all": "typed in for a test"},
    )


def known_machine(outputs: Path) -> Path:
    """`outputs`, made, where this machine counts as measured, which takes 20 s: the tests of the
    demo do it.
    """
    outputs.mkdir(parents=True, exist_ok=True)
    (outputs / "local.json").write_text(json.dumps(to_mapping(small_cluster())))
    return outputs


def small_plan(label: str = "small", train_iters: int = 4, **topology: int) -> Plan:
    """A GPT of two layers on made-up data, trained in seconds."""
    shape = parse_shape("2,64,4,32,384")
    return Plan(
        label=label,
        shape=shape,
        cluster=small_cluster(),
        topology=Topology(**{"mbs": 2, "gbs": 4, **topology}),
        data=Data(source="mock", folder=os.environ.get("TRILANE_OUTPUTS", "outputs") + "/data"),
        run=Run(train_iters=train_iters),
    )


def assert_plausible(measured: Cluster) -> None:
    """A measured machine has the rates of a core, within what a busy one reaches."""
    assert measured.gpu.fp32_flops_per_s > 1e8
    assert measured.gpu.memory_bytes_per_s > 1e8
    assert 1e8 < measured.gpu.context_bytes < 2e9
    assert 1e-7 < measured.launch_overhead_s < 1e-3
    assert 1e-6 < measured.latency_s < 0.1
    assert measured.network_bytes_per_s > 1e6


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Return as soon as `true()`, asked often at first and twice a second later; fail with `what`
    after `seconds`.
    """
    begin = time.monotonic()
    while not true():
        waited = time.monotonic() - begin
        assert waited < seconds, what
        time.sleep(min(max(0.02, waited / 10), 0.5))


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The process inside the block; afterwards it is gone with all its children: a failed test
    leaves no training.
    """
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.extend(psutil.Process(process.pid).children(recursive=True))
        for left in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate()


def heed_ctrl_c() -> None:
    """In a child before it begins: Ctrl-C counts, also where the tests themselves run in the
    background of a shell.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
