"""Copies: frozen code is kept once and starts nothing where it is damaged."""

import shutil
from pathlib import Path

import pytest
from test_script import Play, recorded

from trilane.analysis import collect
from trilane.slurm import copies
from trilane.workspace import installation


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A small package in the place of trilane."""
    folder = tmp_path / "lib/trilane"
    (folder / "data/__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "data/site.json", "data/__pycache__/x.pyc"):
        (folder / name).write_text(name)
    monkeypatch.setattr(copies, "packages", lambda: [folder])
    return folder


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "it's a run").mkdir()
    return tmp_path / "it's a run"


def test_the_same_code_is_kept_once_and_is_no_log_of_its_run(package: Path, home: Path):
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
    assert copies.freeze(home) != first
    assert (first / "trilane/__init__.py").read_text() == "__init__.py"
    (home / "slurm-7.out").write_text("a log\n")
    assert collect.below(home) == [home / "slurm-7.out"]


@pytest.mark.parametrize("how", ["changed", "all"])
def test_a_job_with_a_damaged_copy_starts_nothing_and_the_next_submission_repairs_it(
    how: str, package: Path, home: Path, tmp_path
):
    code, text = copies.freeze(home), recorded("generic")["train-generic.sbatch"]
    if how == "changed":
        (code / "trilane/__init__.py").write_text("raise")
    else:
        shutil.rmtree(code)
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
