"""What the engine's tests share: workers forked from the tests' pool."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from parity import Task
from plans import HERE, changed, evaluations, losses_and_norms, run_folder, steps

from trilane.config.plan import Plan

Fork = Callable[..., None]
Truth = Callable[..., list[list[float]]]


@pytest.fixture(scope="session")
def fork(pool) -> Iterator[Fork]:
    """Run the plan in a folder on so many workers (0: the reference); another end than wanted shows
    their output.
    """

    def forked(processes: int, folder: Path, code: int = 0) -> None:
        problem = pool.run(processes, folder, code)
        assert not problem, problem

    yield forked


@pytest.fixture
def train(fork: Fork, tmp_path) -> Callable[[Plan], list[dict]]:
    """Train a plan in as many processes as it wants and return its steps; its folder is tmp_path /
    "run".
    """

    def trained(plan: Plan) -> list[dict]:
        folder = run_folder(plan, tmp_path / "run")
        fork(plan.topology.gpus, folder)
        return steps(folder)

    return trained


@pytest.fixture(scope="session")
def ask(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """What `code` prints on each rank of a plan, one after another, with `plan`, `world` and `sys`
    at hand.

    Without `joined` no process group is started; the code has `join` to do so.
    """

    def asked(plan: Plan, code: str, joined: bool = True) -> str:
        folder = run_folder(plan, tmp_path_factory.mktemp("ask") / "run")
        (folder / "ask.py").write_text(
            f"import sys\n{'world = join(plan)' if joined else ''}\n{code}"
        )
        fork(plan.topology.gpus, folder)
        return "".join(
            (folder / f"answer.{rank}").read_text() for rank in range(plan.topology.gpus)
        )

    return asked


@pytest.fixture(scope="session")
def truths(
    fork: Fork, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Task, int], Path]:
    """The folder of a task of so many iterations by the plain torch GPT; each is trained once."""

    @functools.cache
    def of(task: Task, iterations: int) -> Path:
        plan = changed(task.plan(HERE, str(data)), "run", train_iters=iterations)
        folder = run_folder(plan, tmp_path_factory.mktemp("truth") / "run")
        fork(0, folder)
        return folder

    return of


@pytest.fixture(scope="session")
def truth(truths: Callable[[Task, int], Path]) -> Truth:
    """[loss, gradient norm] of each iteration of a task of so many."""
    return lambda task, iterations=20: losses_and_norms(truths(task, iterations))


@pytest.fixture(scope="session")
def held_out(truths: Callable[[Task, int], Path]) -> Truth:
    """[iteration, validation loss] of each of its evaluations."""
    return lambda task, iterations: evaluations(truths(task, iterations))
