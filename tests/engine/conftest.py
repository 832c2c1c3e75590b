"""What the engine's tests share: one place for prepared data, and a pool of workers."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plans import HERE, run_folder, steps

from trilane.config.plan import Plan
from trilane.experiments.parity import worker_pool
from trilane.experiments.parity_table import Task


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared pairs and sample indices are kept while the tests run."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def fork() -> Iterator[Callable[..., None]]:
    """Run the plan in a folder on so many workers (0: the reference); another end than wanted shows what they said."""
    with worker_pool() as pool:

        def forked(processes: int, folder: Path, code: int = 0) -> None:
            problem = pool.run(processes, folder, code)
            assert not problem, problem

        yield forked


@pytest.fixture
def train(fork: Callable[[int, Path], None], tmp_path: Path) -> Callable[[Plan], list[dict]]:
    """Train a plan in as many processes as it wants and return its steps; its folder is tmp_path / "run"."""

    def trained(plan: Plan) -> list[dict]:
        folder = run_folder(plan, tmp_path / "run")
        fork(plan.topology.gpus, folder)
        return steps(folder)

    return trained


Truth = Callable[[Task], list[list[float]]]


@pytest.fixture(scope="session")
def truth(fork: Callable[[int, Path], None], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """[loss, gradient norm] of each iteration of a task by the plain torch GPT."""

    @functools.cache
    def of(task: Task) -> list[list[float]]:
        folder = run_folder(task.plan(HERE, str(data)), tmp_path_factory.mktemp("truth") / "run")
        fork(0, folder)
        return json.loads((folder / "truth.json").read_text())

    return of
