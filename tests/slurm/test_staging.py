"""A copy of the environment on each node: it imports from there, and where it cannot be made from the shared one."""

import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from test_script import Play, plan_for

from trilane.slurm import script, sites
from trilane.slurm.nodes import staging
from trilane.slurm.sites import JobRequest, Site

SEES = "import sys, package, frozen; print(sys.prefix, package.__file__, frozen.__file__, *sys.path, sep='\\n')"


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


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code/abc").mkdir(parents=True)
    (tmp_path / "code/abc/frozen.py").touch()
    return tmp_path / "code/abc"


def test_a_node_imports_from_its_copy_alone(shared: Path, code: Path, tmp_path: Path) -> None:
    """Neither sys.path nor a script such as bin/deepspeed leads back to the shared file system."""
    node = tmp_path / "node"
    node.mkdir()
    staging.pack(shared)
    copy = staging.unpack(shared, node, "77", str(code))
    assert copy == node / f"trilane-env-{os.geteuid()}-77" and copy.stat().st_mode & 0o077 == 0
    shutil.rmtree(code)
    (shared / "bin/python").unlink()
    path = f"{shared / 'bin'}:{os.environ['PATH']}"
    lines = f'source {copy / "use"}; python -c "$SEES"; head -1 "$(type -p tool)"; echo $VIRTUAL_ENV'
    env = {"PATH": path, "SEES": SEES, "PYTHONPATH": f"{code}:/other"}
    shown = subprocess.run(["bash", "-c", lines], env=env, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[:1] == [str(copy)] and str(shared) not in shown and str(code) not in shown
    assert shown.count(f"{copy}/") > 4 and "/other" in shown.splitlines()


def test_the_archive_is_made_again_only_when_packages_changed(shared: Path, tmp_path: Path) -> None:
    archive = staging.pack(shared)
    first = archive.stat().st_ino
    assert staging.pack(shared).stat().st_ino == first
    next(shared.glob("lib/python*/site-packages")).joinpath("more-2.dist-info").mkdir()
    assert staging.pack(shared).stat().st_ino != first
    assert {path.name for path in shared.glob("trilane-env*")} == {staging.ARCHIVE, staging.STATE}
    copy = staging.unpack(shared, tmp_path, "1")
    assert not (copy / staging.ARCHIVE).exists() and staging.unpack(shared, tmp_path, "1") == copy


def test_what_a_killed_job_left_is_removed(shared: Path, tmp_path: Path) -> None:
    staging.pack(shared)
    left, new = (staging.folder_of(tmp_path, job) for job in ("4000000005", "4000000006"))
    left.mkdir(), new.mkdir()
    os.utime(left, (1, 1))
    staging.unpack(shared, tmp_path, "77")
    assert (left.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", "stage_env=.*: is no folder"),
        ("full", r"stage_env=.*: .* GB are needed, 0.0 GB are free"),
        ("damaged", "stage_env=.*: tar: "),
        ("taken", "stage_env=.*: File exists"),
        ("no archive", "stage_env=.*: is missing"),
    ],
)
def test_a_node_that_cannot_copy_says_why_and_leaves_nothing(
    how: str, says: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    staging.pack(shared)
    if how == "missing":
        node.rmdir()
    elif how == "full":
        monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    elif how == "damaged":
        (shared / staging.ARCHIVE).write_bytes(b"x" * 5000)
    elif how == "taken":
        staging.folder_of(node, "77").touch()
    else:
        (shared / staging.ARCHIVE).unlink()
    monkeypatch.setattr(sys, "prefix", str(shared))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert staging.main(["unpack", str(node)]) == 1
    (line,) = capfd.readouterr().out.splitlines()
    assert re.search(rf"^trilane: {says}.*; .* imports from {shared}$", line)
    assert not list(node.glob("*/*"))


def site(**fields: object) -> Site:
    return replace(sites.site("generic"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "deepspeed"])
def test_the_job_trains_from_the_copy_of_each_node_where_there_is_one(launcher: str, tmp_path: Path) -> None:
    text = script.render(
        "train", plan_for(site()), site(stage_env="$SCRATCH_HERE/x"), JobRequest(launcher=launcher, preflight=False)
    )
    for exists in (True, False):
        place = tmp_path / str(exists)
        copy = place / f"x/trilane-env-{os.geteuid()}-77"
        copy.mkdir(parents=True)
        play = Play(place)
        if exists:
            (copy / "use").write_text("export STAGED=here\n")
            (place / "bin/rm").write_text('#!/bin/bash\n[[ $1 == -rf ]] || exec /bin/rm "$@"\n')  # it takes too long
            (place / "bin/rm").chmod(0o755)
        # what runs on the nodes in place of the two programs: one leaves the training's environment
        for name in ("python", "deepspeed"):
            text_of = (place / "bin" / name).read_text()
            (place / "bin" / name).write_text(text_of.replace("*engine.torchrun*", "*trilane.engine*plan.json"))
        assert play.run(text, SCRATCH_HERE=str(place)) == 0
        assert play.env.get("STAGED") == ("here" if exists else None)
        calls = [call[2:] for call in play.calls if call[:3] == ["python", "-m", "trilane.slurm.nodes.staging"]]
        assert calls == [
            ["trilane.slurm.nodes.staging", "pack"],
            ["trilane.slurm.nodes.staging", "unpack", f"{place}/x"],
        ]
        # removed at the end; where the time for that is up, a job that begins anew does not take the rest for a copy
        assert not (copy / "use").exists() and copy.exists() is exists


@pytest.mark.parametrize("folder", ["tmp", "/tmp;id", "$(id)", "/t mp", '/a"b', "/a\n", "/", "${A:-$(id)}", "-x", "/é"])
def test_a_folder_that_bash_would_read_otherwise_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match=r"^site\.stage_env=.*: must be a folder of each node"):
        site(stage_env=folder)


def test_a_container_and_a_copy_of_the_environment_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"^site\.stage_env=/tmp: contradicts container_image"):
        site(stage_env="/tmp", container="apptainer", container_image="/images/x.sif")
