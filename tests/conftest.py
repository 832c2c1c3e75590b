"""What several tests need: an outputs folder of their own, one real SLURM, and one pool of workers
that train.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import slurm_cluster
from support import REPOSITORY, known_machine, uncounted

from trilane.report import notebook
from trilane.workspace.study import Study

if TYPE_CHECKING:
    from pool import WorkerPool


# BLAS's second thread waits for a core that another worker of the tests has: a fit of 90 rows costs
# 1.6 times the CPU
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

LONGEST = ("slurm", "demo", "equality", "pool")  # the groups that take minutes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one worker of pytest-xdist runs, the longest first: the real SLURM, slow groups, then
    module by module.

    The tests on the real SLURM are slow ones, and mostly wait: another worker trains, and a third
    takes the rest. All that train in the pool are one group, except for a module that is long
    enough for its own; they are slow, since the pool takes 5 s to start.
    """
    for item in items:
        if "slurm_daemons" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("slurm"))
        elif item.get_closest_marker("xdist_group") is None:
            trains = "pool" in getattr(item, "fixturenames", ())
            if trains:
                item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("pool" if trains else str(item.path)))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, bool, str]:
    group = item.get_closest_marker("xdist_group").args[0]
    return (
        LONGEST.index(group) if group in LONGEST else len(LONGEST),
        item.get_closest_marker("slow") is None,
        group,
    )


@pytest.fixture
def outputs(tmp_path, monkeypatch) -> Path:
    """An outputs folder of this test's own."""
    folder = known_machine(tmp_path / "outputs")
    monkeypatch.setenv("TRILANE_OUTPUTS", str(folder))
    return folder


@pytest.fixture
def uncounted_processes(monkeypatch) -> None:
    """What the test starts runs without coverage, which nearly doubles its time: other tests run
    those lines.
    """
    for name in {*os.environ} - {*uncounted()}:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[slurm_cluster.Cluster]:
    """The only SLURM of this run of the tests."""
    yield from slurm_cluster.started()


@pytest.fixture
def cluster(slurm_daemons: slurm_cluster.Cluster) -> Iterator[slurm_cluster.Cluster]:
    """A real SLURM without jobs and with all its nodes, where SLURM's commands find it; put in
    order afterwards.
    """
    with mock.patch.dict(os.environ, slurm_daemons.variables):
        yield slurm_daemons
    with mock.patch.dict(
        os.environ, slurm_daemons.variables
    ):  # without what the test itself changed
        slurm_daemons.clean()


@pytest.fixture
def commands(tmp_path, monkeypatch) -> slurm_cluster.Commands:
    """Scripts in place of SLURM's commands."""
    return slurm_cluster.Commands(slurm_cluster.fake_commands(tmp_path, monkeypatch))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared pairs and sample indices are kept while the tests run; to make a pair imports
    torch.
    """
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def pool() -> Iterator["WorkerPool"]:
    """Workers forked from a process that has imported every engine, for all tests of a session that
    train.
    """
    from pool import engine_pool

    with engine_pool() as workers:
        yield workers


# The notebooks of a study of 200 billion parameters on 384 GPUs, and their parameters.
BIG: list[tuple[str, dict[str, Any]]] = [
    ("01_sizing", {"choose": "target", "tokens": "366e9"}),
    ("02_topology", {}),
    ("04_analyze", {"logs": "docs/examples/logs", "cluster": "jz-a100-80g"}),
    ("05_diagnose", {"dumps": "docs/examples/dumps"}),
    ("06_backtest", {}),
    (
        "07_calendar",
        {
            "start": "2027-03-01",
            "deadline": "2027-09-01",
            "allocation": 1.5e6,
            "price": 1.5,
            "runs": 1000,
            "tokens": 366e9,
        },
    ),
    ("08_decision", {}),
]


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that study, from its size to its decision."""
    outputs = known_machine(tmp_path_factory.mktemp("big"))
    place = {**uncounted(), "TRILANE_OUTPUTS": str(outputs)}
    with mock.patch.dict(os.environ, place, clear=True), contextlib.chdir(REPOSITORY):
        study = Study.create("big")
        for name, given in BIG:
            notebook.run(name, study, **given)
    return study.folder
