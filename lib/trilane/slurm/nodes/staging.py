"""A copy of the Python environment and the code on each node (site.stage_env), from one archive that each node reads.

`python -m trilane.slurm.nodes.staging pack` makes the archive of the active environment, where none is up to date;
`... unpack BASE`, on each node, makes BASE/trilane-env-USER-JOB. There `use`, which a shell sources, puts the copy in
place of the environment. Whatever fails is one line, and that node imports from the shared environment.

Left out: the standard library of a venv, which is that of the interpreter it was made with; conda's is in the copy.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from trilane.slurm.frozen_code import USED_BY
from trilane.utils.files import read_text
from trilane.utils.validation import require

ARCHIVE, STATE = "trilane-env.tar", "trilane-env.state"
USE = "use"  # the last file of a copy: where it is, the copy is complete
CODE = "trilane-code"
SPARE = 1.1  # of the archive's bytes, for blocks that files fill in part
TAR_S = 900.0
LEFT_S = 3600.0  # a copy that is older, of a job without a process here, was left by a killed one


def pack(prefix: Path) -> Path:
    """The archive of the environment `prefix`, made anew where packages changed; ValueError where it cannot be."""
    archive, now = prefix / ARCHIVE, state(prefix)
    if archive.is_file() and read_text(prefix / STATE) == now:
        return archive
    part = prefix / f"{ARCHIVE}.{platform.node()}.{os.getpid()}"
    own = [f"--exclude=./{name}" for name in (f"{ARCHIVE}*", STATE)]
    try:
        _tar("-cf", str(part), *own, "-C", str(prefix), ".")
        (prefix / STATE).unlink(missing_ok=True)
        part.replace(archive)
        (prefix / STATE).write_text(now, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"stage_env={archive}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return archive


def state(prefix: Path) -> str:
    """A hash that changes when a package is installed, updated or removed."""
    packages = [*prefix.glob("lib/python*/site-packages/*.dist-info"), *prefix.glob("lib/python*/site-packages/*.pth")]
    found = [*packages, *prefix.glob("conda-meta/*.json"), *prefix.glob("pyvenv.cfg")]
    lines = sorted(f"{path.relative_to(prefix)} {path.stat().st_mtime_ns}" for path in found)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def folder_of(base: Path, job: str) -> Path:
    """Where a job's copy lies on a node."""
    return base / f"trilane-env-{os.geteuid()}-{job}"


def unpack(prefix: Path, base: Path, job: str, code: str = "") -> Path:
    """The copy of the environment and of the code below the node-local `base`; ValueError where it cannot be made."""
    require(base.is_absolute() and base.is_dir(), "stage_env", base, "is no folder")
    _remove_left(base, job)
    target, now = folder_of(base, job), state(prefix)
    if (target / USE).is_file() and read_text(target / STATE) == now and not target.is_symlink():
        return target
    archive = prefix / ARCHIVE
    require(archive.is_file(), "stage_env", archive, "is missing")
    need, free = archive.stat().st_size * SPARE, shutil.disk_usage(base).free
    require(need <= free, "stage_env", base, f"{need / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
    except OSError as error:
        raise ValueError(f"stage_env={target}: {error.strerror}") from None
    try:
        _tar("-xf", str(archive), "--no-same-owner", "-C", str(target))
        target.chmod(0o700)
        if code:
            shutil.copytree(code, target / CODE, ignore=shutil.ignore_patterns("__pycache__"))
        _relocate(prefix, target)
        (target / STATE).write_text(now, encoding="utf-8")
        (target / USE).write_text(_use(prefix, target, code), encoding="utf-8")
    except (OSError, shutil.Error, ValueError) as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"stage_env={base}: {getattr(error, 'strerror', None) or error}") from None
    return target


def _relocate(prefix: Path, target: Path) -> None:
    """Let scripts such as bin/deepspeed start the copy's Python."""
    for path in (target / "bin").iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        first = data.split(b"\n", 1)[0]
        if first.startswith(b"#!") and str(prefix).encode() in first:
            path.write_bytes(data.replace(str(prefix).encode(), str(target).encode(), 1))


def _use(prefix: Path, target: Path, code: str) -> str:
    """Lines of shell that put the copy in place of the environment."""
    new = shlex.quote(str(target))
    variable = "CONDA_PREFIX" if (prefix / "conda-meta").is_dir() else "VIRTUAL_ENV"
    lines = [f"export {variable}={new} PATH={new}/bin:$PATH"]
    if code:
        old = shlex.quote(code)
        lines.append(f"export PYTHONPATH={new}/{CODE}${{PYTHONPATH#{old}}}")
    return "\n".join([*lines, ""])


def _remove_left(base: Path, job: str) -> None:
    """Remove this user's copies of jobs that have no process on this node."""
    for path in base.glob(f"trilane-env-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            other = path.name.rpartition("-")[2]
            if other != job and time.time() - path.lstat().st_mtime > LEFT_S and not _has_process(other):
                shutil.rmtree(path)


def _has_process(job: str) -> bool:
    wanted = f"SLURM_JOB_ID={job}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes():
                return True
    return False


def _tar(*words: str) -> None:
    """Run tar; ValueError with its last line where it fails."""
    try:
        done = subprocess.run(["tar", *words], capture_output=True, text=True, timeout=TAR_S, check=False)
        # 1: a file changed while it was read, such as one that another process compiles
        problem = (
            ""
            if done.returncode == 0 or (words[0] == "-cf" and done.returncode == 1)
            else (done.stderr.strip().splitlines() or ["failed"])[-1]
        )
    except FileNotFoundError:
        problem = "tar: not installed"
    except subprocess.TimeoutExpired:
        problem = f"tar: took longer than {TAR_S:.0f} s"
    require(not problem, "stage_env", words[1], problem)


def main(argv: list[str]) -> int:
    """`pack`, or `unpack BASE`; 1 with one line where the shared environment is used instead."""
    begin, prefix = time.monotonic(), Path(sys.prefix)
    try:
        if argv == ["pack"]:
            made = pack(prefix)
        else:
            base = Path(argv[1])
            made = unpack(prefix, base, os.environ.get("SLURM_JOB_ID", "0"), os.environ.get(USED_BY, ""))
    except (ValueError, OSError) as error:
        print(f"trilane: {error}; {platform.node()} imports from {prefix}", flush=True)
        return 1
    print(f"trilane: {made} on {platform.node()}, {time.monotonic() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
