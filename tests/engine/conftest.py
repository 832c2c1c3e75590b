"""What the engine's tests share: one place for prepared data, and a nursery of workers."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plans import run_folder, small_plan, steps

from trilane.launch import environment, free_port
from trilane.plan import Plan

NURSERY = Path(__file__).parent / "nursery.py"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared pairs and sample indices are kept while the tests run."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def fork() -> Iterator[Callable[..., None]]:
    """Run the plan in a folder on so many workers (0: the reference); another end than wanted shows what they said."""
    env = {k: v for k, v in environment(8).items() if k != "TRILANE_PARENT_PID"}  # the nursery is their parent
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(NURSERY)], env=env, text=True, **pipes) as nursery:

        def forked(processes: int, folder: Path, code: int = 0) -> None:
            assert nursery.stdin is not None and nursery.stdout is not None
            nursery.stdin.write(f"{processes} {free_port(0)} {folder}\n")
            nursery.stdin.flush()
            codes = nursery.stdout.readline().split()
            said = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
            assert codes and set(codes) == {str(code)}, said

        yield forked


@pytest.fixture
def train(fork: Callable[[int, Path], None], tmp_path: Path) -> Callable[[Plan], list[dict]]:
    """Train a plan in as many processes as it wants and return its steps; its folder is tmp_path / "run"."""

    def trained(plan: Plan) -> list[dict]:
        folder = run_folder(plan, tmp_path / "run")
        fork(plan.topology.gpus, folder)
        return steps(folder)

    return trained


@pytest.fixture(scope="session")
def truth(fork: Callable[[int, Path], None], data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """[loss, gradient norm] of each iteration of the small plan by the plain torch GPT."""
    folder = run_folder(small_plan(data), tmp_path_factory.mktemp("truth") / "run")
    fork(0, folder)
    return json.loads((folder / "truth.json").read_text())
