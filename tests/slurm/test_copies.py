"""Copies: frozen code is kept once and starts nothing where it is damaged; a node imports from its own environment."""

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from test_script import Play, plan_for, recorded

from trilane.analysis import collect
from trilane.slurm import copies, script, sites
from trilane.slurm.sites import JobRequest, Site
from trilane.workspace import installation

SEES = "import sys, package, frozen; print(sys.prefix, package.__file__, frozen.__file__, *sys.path, sep='\\n')"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in the place of trilane."""
    folder = tmp_path / "lib/trilane"
    (folder / "data/__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "data/site.json", "data/__pycache__/x.pyc"):
        (folder / name).write_text(name)
    monkeypatch.setattr(copies, "package", lambda: folder)
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
    assert not list(first.rglob("__pycache__")) and {p.name for p in (home / "code").iterdir()} == {first.name}
    (package / "__init__.py").write_text("changed")
    assert copies.freeze(home) != first and (first / "trilane/__init__.py").read_text() == "__init__.py"
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
    assert play.errors == f"trilane: code={code}: is missing or damaged, and nothing was started; submit again\n"
    assert not play.log.exists()
    assert copies.freeze(home) == code
    assert play.run(text, str(code), PYTHONPATH="/other") == 0 and not play.errors
    assert (play.env["PYTHONPATH"], play.env["TRILANE_CODE"]) == (f"{code}:/other", str(code))
    assert (play.place / "run.log").read_text().splitlines()[0].endswith(f" code {code.name}")
    assert play.run(text) == 0 and "PYTHONPATH" not in play.env, "submitted by hand it runs the installed code"


def test_code_that_cannot_be_frozen_is_one_line(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^run folder=.*a:b: must hold no colon"):
        copies.freeze(tmp_path / "a:b")
    (tmp_path / "code").write_text("a file")
    with pytest.raises(ValueError, match=r"^code=.*/code: cannot be written \("):
        copies.freeze(tmp_path)
    with monkeypatch.context() as full, pytest.raises(ValueError, match=r"^code=.*/code: cannot be written \(No space"):
        full.setattr(copies.shutil, "copytree", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
        copies.freeze(tmp_path / "full")
    assert not list((tmp_path / "full/code").iterdir())  # a part of a copy would keep the disk full
    copy = shutil.copytree

    def changing(*words: object, **how: object) -> None:
        copy(*words, **how)
        (package / "__init__.py").write_text("changed")

    monkeypatch.setattr(copies.shutil, "copytree", changing)
    with pytest.raises(ValueError, match=r"^code=.*/trilane: is being changed"):
        copies.freeze(tmp_path / "run")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A virtual environment with a package, and a script that starts its Python."""
    place = tmp_path / "shared env"
    venv.create(place, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "package.py").touch()
    (packages / "package-1.dist-info").mkdir()
    (place / "bin/tool").write_text(f"#!{place}/bin/python\nimport sys; print(sys.prefix)\n")
    (place / "bin/tool").chmod(0o755)
    return place


def test_a_node_imports_from_its_copy_alone(shared: Path, tmp_path: Path) -> None:
    """Neither sys.path nor a script such as bin/deepspeed leads back to the shared file system."""
    node, code = tmp_path / "node", tmp_path / "code/abc"
    node.mkdir(), code.mkdir(parents=True)
    (code / "frozen.py").touch()
    copies.pack(shared)
    copy = copies.unpack(shared, node, "77", str(code))
    assert copy == node / f"trilane-env-{os.geteuid()}-77" and copy.stat().st_mode & 0o077 == 0
    shutil.rmtree(code)
    (shared / "bin/python").unlink()
    path = f"{shared / 'bin'}:{os.environ['PATH']}"
    lines = f'source {copy / "use"}; python -c "$SEES"; head -1 "$(type -p tool)"; echo $VIRTUAL_ENV'
    env = {"PATH": path, "SEES": SEES, "PYTHONPATH": f"{code}:/other"}
    shown = subprocess.run(["bash", "-c", lines], env=env, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[:1] == [str(copy)] and str(shared) not in shown and str(code) not in shown
    assert shown.count(f"{copy}/") > 4 and "/other" in shown.splitlines()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", "No such file or directory"),
        ("damaged", "tar=.*: tar: "),
        ("taken", "File exists"),
    ],
)
def test_a_node_that_cannot_copy_says_why_and_leaves_nothing(
    how: str, says: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    copies.pack(shared)
    if how == "missing":
        node.rmdir()
    elif how == "damaged":
        (shared / copies.ARCHIVE).write_bytes(b"x" * 5000)
    else:
        copies.folder_of(node, "77").touch()
    monkeypatch.setattr(sys, "prefix", str(shared))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert copies.main(["unpack", str(node)]) == 1
    (line,) = capfd.readouterr().out.splitlines()
    assert re.search(rf"^trilane: stage_env: .*{says}.*; .* imports from {shared}$", line)
    assert not list(node.glob("*/*"))


def site(**fields: object) -> Site:
    return replace(sites.site("generic"), **fields)  # type: ignore[arg-type]


def test_the_job_trains_from_the_copy_of_each_node_where_there_is_one(tmp_path: Path) -> None:
    text = script.render("train", plan_for(site()), site(stage_env="$SCRATCH_HERE/x"), JobRequest(preflight=False))
    for exists in (True, False):
        place = tmp_path / str(exists)
        copy = place / f"x/trilane-env-{os.geteuid()}-77"
        copy.mkdir(parents=True)
        play = Play(place)
        if exists:
            (copy / "use").write_text("export STAGED=here\n")
            (place / "bin/rm").write_text('#!/bin/bash\n[[ $1 == -rf ]] || exec /bin/rm "$@"\n')  # it takes too long
            (place / "bin/rm").chmod(0o755)
        assert play.run(text, SCRATCH_HERE=str(place)) == 0
        assert play.env.get("STAGED") == ("here" if exists else None)
        calls = [call[3:] for call in play.calls if call[:3] == ["python", "-m", "trilane.slurm.copies"]]
        assert calls == [["pack"], ["unpack", f"{place}/x"]]
        # removed at the end; where the time for that is up, a job that begins anew does not take the rest for a copy
        assert not (copy / "use").exists() and copy.exists() is exists
