"""A run on this machine ends in one of four ways, says which and why, and leaves nobody behind."""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from plans import run_folder, small_plan, steps
from support import ended, wait_until

from trilane.config.plan import read_plan
from trilane.launch.local import environment, train_local
from trilane.launch.local import run_folder as launched_in
from trilane.workspace.status import known_status

ITERATION = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +\d+/ +\d+ \| .* nan iterations:   0 \|"
)
MEMORY = re.compile(
    r"\[Rank (\d)\] \(after [14] iterations\) memory \(MB\) \| allocated: [\d.]+ \| max allocated: .*"
)
PATH = "trilane: unfused path (no GPU)"  # rank 0 says it first
FOREVER = 100_000


@pytest.fixture
def folder(request: pytest.FixtureRequest, data: Path, tmp_path) -> Path:
    """A run of two stages, or of another topology, that would take for ever."""
    topology = getattr(request, "param", {"pp": 2})
    return run_folder(small_plan(data, iters=FOREVER, source="mock", **topology), tmp_path / "run")


@pytest.fixture
def launched(folder: Path) -> Iterator[subprocess.Popen]:
    """The launcher of that run, as a command, once its training is under way."""
    command = [sys.executable, "-m", "trilane", "train", f"{folder}/plan.json"]
    process = subprocess.Popen(
        command, env=environment(8), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ended(process):
        wait_until(
            lambda: (folder / "steps.jsonl").exists() and len(steps(folder)) > 2, 300, "training"
        )
        family = psutil.Process(process.pid).children(recursive=True)
        yield process
        for left in family:  # whom a killed launcher left behind
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses on which these processes wait for connections."""
    sockets = (
        one
        for p in processes
        for one in p.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    )
    return {one.laddr.ip for one in sockets}


def worker(processes: list[psutil.Process], rank: int) -> psutil.Process:
    """The process of that rank; torchrun has no RANK."""
    return next(p for p in processes if p.environ().get("RANK") == str(rank))


@pytest.mark.slow
def test_a_run_that_completes_leaves_a_clean_log_its_steps_its_stamp_and_its_status(data, tmp_path):
    folder = run_folder(small_plan(data, iters=4, source="mock", pp=2), tmp_path / "run")
    outcome = train_local(folder)
    said = (folder / "run.log").read_text().splitlines()
    assert (outcome.status, outcome.evidence, outcome.exit_code) == (
        "completed",
        "iteration 4 of 4",
        0,
    )
    assert outcome == known_status(folder)
    assert len([line for line in said if ITERATION.fullmatch(line)]) == 4
    others = [line for line in said if not ITERATION.fullmatch(line)]
    assert [line for line in others if not MEMORY.fullmatch(line)] == [PATH]
    assert [s["iteration"] for s in steps(folder)] == [1, 2, 3, 4]
    stamp = json.loads((folder / "env.json").read_text())
    assert stamp["versions"]["megatron-core"] == version("megatron-core")
    assert (stamp["world_size"], stamp["devices"]) == (2, ["cpu"])
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_nothing_listens_beyond_this_machine_and_a_killed_rank_ends_all_within_30_s_and_is_named(
    folder, launched: subprocess.Popen
):
    family = psutil.Process(launched.pid).children(recursive=True)
    assert listening(family) == {"127.0.0.1"}
    worker(family, 0).kill()
    begin = time.monotonic()
    out, _ = launched.communicate(timeout=30)
    assert time.monotonic() - begin < 30
    outcome = known_status(folder)
    assert (outcome.status, outcome.rank, launched.returncode) == ("killed", 0, 1)
    assert outcome.evidence.startswith(
        "rank 0: killed by SIGKILL after: [Rank 0] (after 1 iterations) memory"
    )
    assert outcome.evidence in out
    assert gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [{}], indirect=True, ids=["one process"])
def test_a_launcher_killed_outright_leaves_no_orphan(launched: subprocess.Popen):
    """SIGKILL cannot be caught: the kernel ends torchrun with the launcher, and the workers with
    torchrun.
    """
    family = psutil.Process(launched.pid).children(recursive=True)
    launched.kill()
    wait_until(lambda: gone(family), 5, "end of all processes")


def test_what_must_not_start_is_refused_before_anything_is_written(data, tmp_path, monkeypatch):
    """A folder that holds a run, and a corpus that is not there."""
    folder = run_folder(small_plan(data, source=f"{tmp_path}/nowhere"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"^data.source=.*nowhere: no such file or folder"):
        train_local(folder)
    for left in ("run.log", "steps.jsonl", "status.json"):
        (folder / left).write_text("precious")
        with pytest.raises(ValueError, match=r"run folder=.*: holds a run already"):
            train_local(folder)
        assert (folder / left).read_text() == "precious" and len(list(folder.iterdir())) == 2
        (folder / left).unlink()


def test_a_plan_of_any_name_runs_in_a_folder_called_like_it(data, tmp_path):
    """A plan that a search printed, saved as best.json, is a plan; what stands in its way is never
    overwritten.
    """
    best = tmp_path / "best.json"
    best.write_text(json.dumps({**small_plan(data).to_json(), "prediction": {"sec_per_it": 1.0}}))
    folder = launched_in(best)
    assert folder == tmp_path / "best" and read_plan(folder) == read_plan(best)
    with pytest.raises(ValueError, match=r"^plan=.*best\.json: would run in .*best, which exists"):
        launched_in(best)
    with pytest.raises(ValueError, match=r"^plan=.*: no such file$"):
        launched_in(tmp_path / "other.json")
