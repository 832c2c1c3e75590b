"""The frozen code of submissions: kept once for the same code, damaged it starts nothing, in use it is not removed."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support import small_plan
from test_script import Play, recorded

from trilane.analysis import paths
from trilane.slurm import client, frozen_code, ledger, preparation, sites
from trilane.slurm.sites import JobRequest
from trilane.utils.files import append_line
from trilane.workspace import installation


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in the place of trilane."""
    folder = tmp_path / "lib/trilane"
    (folder / "data/__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "data/site.json", "data/__pycache__/x.pyc"):
        (folder / name).write_text(name)
    monkeypatch.setattr(frozen_code, "package", lambda: folder)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "it's a run").mkdir()
    return tmp_path / "it's a run"


@pytest.fixture
def play(tmp_path: Path) -> Play:
    (tmp_path / "play").mkdir()
    return Play(tmp_path / "play")


def test_the_same_code_is_kept_once_and_other_code_beside_it(package: Path, home: Path) -> None:
    first = frozen_code.freeze(home)
    assert first == frozen_code.freeze(home) and first.name == frozen_code.fingerprint()
    assert (first / "trilane/data/site.json").read_text() == "data/site.json"
    assert (first / "share/trilane/slurm_templates/train.sbatch").is_file()
    assert not list(first.rglob("__pycache__")) and {p.name for p in (home / "code").iterdir()} == {first.name}
    (package / "__init__.py").write_text("changed")
    second = frozen_code.freeze(home)
    assert second != first and (first / "trilane/__init__.py").read_text() == "__init__.py"


def test_a_copy_is_no_log_of_its_sweep(package: Path, home: Path) -> None:
    (package / "data/LICENSE").write_text("some text")
    frozen_code.freeze(home)
    (home / "slurm-7.out").write_text("a log\n")
    assert paths.files(str(home)) == [home / "slurm-7.out"]


def test_a_copy_knows_from_which_revision_it_was_made(home: Path) -> None:
    code = frozen_code.freeze(home)
    assert (code / installation.REVISION).read_text().strip() == installation.revision()


@pytest.mark.parametrize("how", ["changed", "lost", "list", "all"])
def test_a_job_with_a_damaged_copy_starts_nothing_and_says_it_in_one_line(
    how: str, package: Path, home: Path, play: Play
) -> None:
    """The next submission repairs the copy."""
    code = frozen_code.freeze(home)
    script = recorded("generic")["train-generic.sbatch"]
    if how == "changed":
        (code / "trilane/__init__.py").write_text("raise")
    elif how == "all":
        shutil.rmtree(code)
    else:
        (code / {"lost": "trilane/data/site.json", "list": installation.SUMS}[how]).unlink()
    assert play.run(script, str(code)) == 1
    assert play.errors == f"trilane: code={code}: is missing or damaged, and nothing was started; submit again\n"
    assert not play.log.exists()
    assert frozen_code.freeze(home) == code
    assert play.run(script, str(code), PYTHONPATH="/other") == 0 and not play.errors
    assert (play.env["PYTHONPATH"], play.env["TRILANE_CODE"]) == (f"{code}:/other", str(code))
    assert (play.place / "run.log").read_text().splitlines()[0].endswith(f" code {code.name}")


def test_a_script_submitted_by_hand_runs_the_installed_code_and_says_so(play: Play) -> None:
    assert play.run(recorded("generic")["train-generic.sbatch"]) == 0
    assert "PYTHONPATH" not in play.env
    assert (play.place / "run.log").read_text().splitlines()[0].endswith(" code installed")


def submitted(folder: Path, code: str, job: str, **facts: object) -> None:
    """A submission of two hours ago."""
    folder.mkdir(parents=True, exist_ok=True)
    for event, given in (("submitting", ""), ("submitted", job)):
        if event == "submitting" or job:
            ledger.note(folder, event, given, token=TOKEN % int(job or 0), code=code, **OTHERS, **facts)
    text = (folder / ledger.NAME).read_text()
    (folder / ledger.NAME).unlink()
    for line in text.splitlines():
        stamp = line.partition('"time": "')[2][:25]
        append_line(folder / ledger.NAME, line.replace(stamp, "2020-01-01T00:00:00+00:00"))


TOKEN, OTHERS = "trilane-%012d", {"site": "s", "script": "x", "suffix": ""}


@pytest.mark.parametrize(
    ("state", "job", "where", "facts", "stays"),
    [
        ("COMPLETED", "5", "", {}, False),
        ("PENDING", "5", "", {}, True),
        ("PENDING", "5", "stage-2", {}, True),
        ("RUNNING", "5", "runs/one", {}, True),
        ("FORGOTTEN", "5", "stage-2", {}, False),
        ("PENDING", "5", "", {"lines": [7]}, True),
        ("COMPLETED", "", "", {}, True),
        ("", "5", "", {}, True),
    ],
    ids=["ended", "waits", "stage", "sweep", "forgotten", "array", "unknown", "unreachable"],
)
def test_a_copy_goes_when_no_job_can_use_it(
    state: str, job: str, where: str, facts: dict, stays: bool, package: Path, home: Path, monkeypatch
) -> None:
    def states(ids: list[str]) -> dict[str, client.JobState]:
        if not state:
            raise client.SlurmUnreachable("slurm=squeue: away")
        known = [f"{job}_7"] if facts else [job]
        return {i: client.JobState(id=i, state=state if i in known else client.FORGOTTEN) for i in ids}

    monkeypatch.setattr(client, "states", states)
    old = frozen_code.freeze(home)
    os.utime(old, (time.time() - 7200,) * 2)
    submitted(home / where, old.name, job, **facts)
    (package / "__init__.py").write_text("changed")
    new = frozen_code.freeze(home)
    frozen_code.discard_unused(home, new)
    assert (old.exists(), new.exists()) == (stays, True)


@pytest.mark.parametrize(("state", "stays"), [("PENDING", True), ("COMPLETED", False)])
def test_a_job_that_prepares_the_corpus_keeps_its_copy_until_it_has_ended(
    state: str, stays: bool, package: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for hours, while the run itself is submitted with newer code."""
    monkeypatch.setattr(client, "states", lambda ids: {i: client.JobState(id=i, state=state) for i in ids})
    monkeypatch.setattr(preparation.submission, "sbatch", lambda script, **arguments: "5")
    plan = small_plan()
    plan = replace(plan, data=replace(plan.data, source=str(home / "corpus.txt")))
    (home / "corpus.txt").write_text("a corpus\n" * 9)
    (home / "plan.json").write_text(json.dumps(plan.to_json()))
    assert preparation.prepare([home], sites.site("generic"), JobRequest()) == {home: "5"}
    (old,) = (home / "code").iterdir()
    os.utime(old, (time.time() - 7200,) * 2)
    (package / "__init__.py").write_text("changed")
    frozen_code.discard_unused(home, frozen_code.freeze(home))
    assert old.exists() == stays


def test_a_copy_of_the_last_hour_stays(package: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended job may be put back into the queue for as long as SLURM keeps it."""
    monkeypatch.setattr(client, "states", lambda ids: {})
    old = frozen_code.freeze(home)
    (package / "__init__.py").write_text("changed")
    frozen_code.discard_unused(home, frozen_code.freeze(home))
    assert old.exists()


def test_code_that_cannot_be_frozen_is_one_line(package: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"^run folder=.*a:b: must hold no colon"):
        frozen_code.freeze(tmp_path / "a:b")
    (tmp_path / "code").write_text("a file")
    with pytest.raises(ValueError, match=r"^code=.*/code: cannot be written \("):
        frozen_code.freeze(tmp_path)
    home = tmp_path / "full"
    with monkeypatch.context() as full, pytest.raises(ValueError, match=r"^code=.*/code: cannot be written \(No space"):
        full.setattr(Path, "write_bytes", lambda path, data: (_ for _ in ()).throw(OSError(28, "No space left")))
        frozen_code.freeze(home)
    assert not list((home / "code").iterdir())  # a part of a copy would keep the disk full
    ticks = iter(range(9))
    monkeypatch.setattr(frozen_code, "_stamps", lambda paths: [next(ticks)])
    with pytest.raises(ValueError, match=r"^code=.*/trilane: is being changed"):
        frozen_code.freeze(tmp_path / "run")
