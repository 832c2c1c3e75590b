"""Copies: frozen code is kept once and starts nothing where it is damaged; a node imports from its
own environment.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_script import Play, plan_for, recorded

from trilane.analysis import collect
from trilane.slurm import copies, script, sites
from trilane.slurm.sites import JobRequest, Site
from trilane.workspace import installation


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in the place of trilane."""
    folder = tmp_path / "lib/trilane"
    (folder / "data/__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "data/site.json", "data/__pycache__/x.pyc"):
        (folder / name).write_text(name)
    monkeypatch.setattr(copies, "packages", lambda: [folder])
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "it's a run").mkdir()
    return tmp_path / "it's a run"


def test_the_same_code_is_kept_once_and_is_no_log_of_its_run(package: Path, home: Path) -> None:
    (package / "data/LICENSE").write_text("some text")
    first = copies.freeze(home)
    assert first == copies.freeze(home)
    assert (first / "trilane/data/site.json").read_text() == "data/site.json"
    assert (first / "share/trilane/slurm_templates/train.sbatch").is_file()
    assert (first / "REVISION").read_text().strip() == installation.revision()
    assert not list(first.rglob("__pycache__")) and {p.name for p in (home / "code").iterdir()} == {
        first.name
    }
    (package / "__init__.py").write_text("changed")
    assert (
        copies.freeze(home) != first
        and (first / "trilane/__init__.py").read_text() == "__init__.py"
    )
    (home / "slurm-7.out").write_text("a log\n")
    assert collect.files(str(home)) == [home / "slurm-7.out"]


@pytest.mark.parametrize("how", ["changed", "lost", "all"])
def test_a_job_with_a_damaged_copy_starts_nothing_and_the_next_submission_repairs_it(
    how: str, package: Path, home: Path, tmp_path: Path
) -> None:
    code, text = copies.freeze(home), recorded("generic")["train-generic.sbatch"]
    if how == "changed":
        (code / "trilane/__init__.py").write_text("raise")
    elif how == "all":
        shutil.rmtree(code)
    else:
        (code / "trilane/data/site.json").unlink()
    (tmp_path / "play").mkdir()
    play = Play(tmp_path / "play")
    assert play.run(text, str(code)) == 1
    assert (
        play.errors
        == f"trilane: code={code}: is missing or damaged, and nothing was started; submit again\n"
    )
    assert not play.log.exists()
    assert copies.freeze(home) == code
    assert play.run(text, str(code), PYTHONPATH="/other") == 0 and not play.errors
    assert (play.env["PYTHONPATH"], play.env["TRILANE_CODE"]) == (f"{code}:/other", str(code))
    assert (play.place / "run.log").read_text().splitlines()[0].endswith(f" code {code.name}")
    assert play.run(text) == 0 and "PYTHONPATH" not in play.env, (
        "submitted by hand it runs the installed code"
    )


def site(**fields: object) -> Site:
    return replace(sites.site("generic"), **fields)  # type: ignore[arg-type]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """A job whose environment is a folder with a program python and a package."""
    made, shared = Play(tmp_path), tmp_path / "it's shared"
    (shared / "lib/python3.11/site-packages").mkdir(parents=True)
    shutil.copytree(tmp_path / "bin", shared / "bin")
    (shared / "lib/python3.11/site-packages/package.py").touch()
    (tmp_path / "bin/activate").write_text(
        'export VIRTUAL_ENV="${BASH_SOURCE[0]%/bin/*}/it\'s shared"\n'
    )
    (tmp_path / "node").mkdir()
    stand_in(
        tmp_path / "bin/rm",
        '[[ $KEEP && $1 == -rf && $2 == */trilane-env-* ]] || exec /bin/rm "$@"',
    )
    return made


def stand_in(path: Path, does: str) -> None:
    """A command that a job finds before the system's own."""
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)


def staged(play: Play, *arguments: str, **env: str) -> Path:
    """Run a job that stages its environment; where its copy on the node is."""
    here = site(stage_env="$NODE/x")
    text = script.render("train", plan_for(here), here, JobRequest(preflight=False))
    assert play.run(text, *arguments, NODE=str(play.place / "node"), **env) == 0, play.errors
    return play.place / f"node/x/trilane-env-{os.geteuid()}-77"


def test_a_job_trains_from_the_copy_of_its_node_alone_and_removes_it(
    play: Play, package: Path, home: Path, tmp_path: Path
) -> None:
    """Neither PATH nor PYTHONPATH leads back to the shared file system before it leads
    to the copy.
    """
    (tmp_path / "node/x").mkdir()
    code = copies.freeze(home)
    copy = staged(play, str(code), PYTHONPATH="/other", KEEP="1")
    assert (play.env["VIRTUAL_ENV"], play.env["PATH"].split(":")[0]) == (str(copy), f"{copy}/bin")
    assert play.env["PYTHONPATH"] == f"{copy}/trilane-code:/other"
    assert (
        copy / "lib/python3.11/site-packages/package.py"
    ).exists() and copy.stat().st_mode & 0o077 == 0
    assert (copy / "trilane-code/trilane/__init__.py").exists()
    # where the time for the removal is up, a job that begins anew does not take the rest for a copy
    assert not (copy / "ready").exists()
    assert not staged(play).exists()


@pytest.mark.parametrize("how", ["missing", "damaged", "taken"])
def test_a_node_that_cannot_copy_says_why_in_one_line_leaves_nothing_and_trains(
    how: str, play: Play, tmp_path: Path
) -> None:
    """On a full disk tar has a line for each file."""
    if how != "missing":
        (tmp_path / "node/x").mkdir()
    if how == "damaged":
        (tmp_path / "it's shared/trilane-env.tar").write_bytes(b"x" * 5000)
    elif how == "taken":  # by a link that cannot be removed, to files of one's own
        shutil.copytree(tmp_path / "bin", tmp_path / "others/bin")
        (tmp_path / f"node/x/trilane-env-{os.geteuid()}-77").symlink_to(tmp_path / "others")
        (tmp_path / "others/ready").touch()
        os.utime(tmp_path / "others/ready", (4e9, 4e9))
    copy = staged(play, KEEP="1" if how == "taken" else "")
    (line,) = (play.place / "run.log").read_text().partition("START")[0].splitlines()
    reason = {
        "missing": "No such file",
        "damaged": "tar: ",
        "taken": "File exists",
        "full": "tar: a: no space;",
    }
    assert line.startswith(f"trilane: stage_env={copy}: cannot be made on ")
    assert reason.get(how, "Permission denied") in line
    assert line.endswith(f"; it imports from {tmp_path}/it's shared")
    assert play.env["VIRTUAL_ENV"] == f"{tmp_path}/it's shared" and copy.exists() is (
        how == "taken"
    )
