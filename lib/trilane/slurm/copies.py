"""Copies: the installed code frozen next to a submission, and the Python environment unpacked on each node.

A job may wait for days, and goes back into the queue when a node fails: it runs what was installed when it was
submitted, from code/HASH below the folder that was submitted. With site.stage_env each node of a job unpacks one
archive of the environment and imports from there: a process that imports torch and DeepSpeed opens 8,075 files.

    python -m trilane.slurm.copies pack            makes the archive of the active environment, where packages changed
    python -m trilane.slurm.copies unpack FOLDER   on each node, makes FOLDER/trilane-env-USER-JOB with a file `use`,
                                                   which a shell sources to put the copy in place of the environment

Whatever fails there is one line, and that node imports from the shared environment. Left out: the standard library of a
venv, which is that of the interpreter it was made with ; and what a killed job leaves.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trilane.utils.files import read_text
from trilane.utils.validation import require
from trilane.workspace.installation import package, revision, shipped

# what a script that runs the frozen code mentions
USED_BY = "TRILANE_CODE"
ARCHIVE = "trilane-env.tar"


def freeze(home: Path) -> Path:
    """The copy of the installed code below `home`, made where it is not there or damaged.

    It holds plain files, not one archive: data files are read by their paths, a traceback shows its lines, and a person
    can compare two copies. Raises ValueError where it cannot be read or written, or is being changed.
    """
    require(":" not in str(home), "run folder", home, "must hold no colon, which separates the folders of PYTHONPATH")
    code = home / "code"
    try:
        code.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=code) as place:
            part = Path(place) / "copy"
            for name, root in _roots().items():
                shutil.copytree(root, part / name, ignore=shutil.ignore_patterns("__pycache__"))
            sums = _sums({name: part / name for name in _roots()})
            # an update of the installation takes seconds, in which half of it is old
            require(sums == _sums(_roots()), "code", package(), "is being changed; submit when that has ended")
            target = code / _digits(sums)
            listed = read_text(target / "SHA256SUMS")
            if listed != sums or _sums({name: target / name for name in _roots()}) != sums:
                (part / "SHA256SUMS").write_text(sums)
                (part / "REVISION").write_text(f"{revision()}\n")
                shutil.rmtree(target, ignore_errors=True)
                part.rename(target)
    except OSError as error:
        raise ValueError(f"code={code}: cannot be written ({error.strerror or error})") from None
    return target


def _roots() -> dict[str, Path]:
    """The folders of the package and of its templates, by their name in a copy."""
    return {"trilane": package(), "share/trilane/slurm_templates": shipped("slurm_templates")}


def _sums(roots: dict[str, Path]) -> str:
    """The files below folders in the form of sha256sum, which the job checks them with."""
    paths = [(f"{name}/{path.relative_to(root)}", path) for name, root in roots.items() for path in root.rglob("*")]
    files = sorted((name, path) for name, path in paths if path.is_file() and "__pycache__" not in path.parts)
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files)


def _digits(sums: str) -> str:
    return hashlib.sha256(sums.encode()).hexdigest()[:16]


def pack(prefix: Path) -> Path:
    """The archive of the environment `prefix`, made again where packages changed; ValueError where it cannot be."""
    archive, begin = prefix / ARCHIVE, time.time()
    # to install, update or remove a package changes one of these folders
    places = [*prefix.glob("lib/python*/site-packages"), *prefix.glob("conda-meta"), *prefix.glob("pyvenv.cfg")]
    if not archive.is_file() or archive.stat().st_mtime < max(place.stat().st_mtime for place in places):
        part = prefix / f"{ARCHIVE}.{platform.node()}.{os.getpid()}"
        try:
            _tar("-cf", str(part), f"--exclude=./{ARCHIVE}*", "-C", str(prefix), ".")
            os.utime(part, (begin, begin))
            part.replace(archive)
        finally:
            part.unlink(missing_ok=True)
    return archive


def folder_of(base: Path, job: str) -> Path:
    """Where a job's copy lies on a node."""
    return base / f"trilane-env-{os.geteuid()}-{job}"


def unpack(prefix: Path, base: Path, job: str, code: str = "") -> Path:
    """The copy of the environment and of the code below the node-local `base`; OSError or ValueError where it cannot be
    made, and nothing is left of it."""
    target, use = folder_of(base, job), folder_of(base, job) / "use"
    if use.is_file() and use.stat().st_mtime > (prefix / ARCHIVE).stat().st_mtime and not target.is_symlink():
        return target  # of this job, which was requeued
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)  # fails where it is another user's
    try:
        _fill(target, prefix, code)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def _fill(target: Path, prefix: Path, code: str) -> None:
    """Unpack the archive, let scripts such as bin/deepspeed start the copy's Python, and write `use` last."""
    _tar("-xf", str(prefix / ARCHIVE), "--no-same-owner", "-C", str(target))
    target.chmod(0o700)
    if code:
        shutil.copytree(code, target / "trilane-code", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (target / "bin").iterdir():
        data = b"" if path.is_symlink() or not path.is_file() else path.read_bytes()
        if data.startswith(b"#!") and str(prefix).encode() in data.split(b"\n", 1)[0]:
            path.write_bytes(data.replace(str(prefix).encode(), str(target).encode(), 1))
    new, variable = shlex.quote(str(target)), "CONDA_PREFIX" if (prefix / "conda-meta").is_dir() else "VIRTUAL_ENV"
    more = f"export PYTHONPATH={new}/trilane-code${{PYTHONPATH#{shlex.quote(code)}}}\n" if code else ""
    (target / "use").write_text(f"export {variable}={new} PATH={new}/bin:$PATH\n{more}", encoding="utf-8")


def _tar(*words: str) -> None:
    """Run tar; ValueError with its last line where it fails."""
    done = subprocess.run(["tar", *words], capture_output=True, text=True, timeout=900, check=False)
    # 1: a file changed while it was read, such as one that another process compiles
    is_done = done.returncode == 0 or (words[0] == "-cf" and done.returncode == 1)
    require(is_done, "tar", words[1], (done.stderr.strip().splitlines() or ["tar failed"])[-1])


def main(argv: list[str]) -> int:
    """`pack`, or `unpack FOLDER`; 1 with one line where the shared environment is used instead."""
    begin, prefix, job = time.monotonic(), Path(sys.prefix), os.environ.get("SLURM_JOB_ID", "0")
    try:
        is_pack = argv == ["pack"]
        made = pack(prefix) if is_pack else unpack(prefix, Path(argv[1]), job, os.environ.get(USED_BY, ""))
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        print(f"trilane: stage_env: {error}; {platform.node()} imports from {prefix}", flush=True)
        return 1
    print(f"trilane: {made} on {platform.node()}, {time.monotonic() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
