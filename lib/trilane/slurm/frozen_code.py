"""The code of a submission, frozen: a copy of the installed trilane below the folder that is submitted, in code/HASH.

A job may wait for days, and goes back into the queue when a node fails: it runs what was installed when it was
submitted. The copy holds plain files, not one archive: data files are read by their paths, a traceback shows its lines,
and a person can compare two copies. It has as many files as the package, some 320 and as many again for what Python
compiles; runs with the same code in one folder (a sweep, a chain) share it.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from trilane.slurm import client, ledger
from trilane.utils.validation import require
from trilane.workspace.installation import REVISION, SUMS, package, revision, shipped

FOLDER = "code"
USED_BY = "TRILANE_CODE"  # what a script that runs the frozen code mentions
DIGITS = 16  # of the SHA-256 of SHA256SUMS
TRIES = 3
# after the last submission with a copy: SLURM can put an ended job back into the queue for some minutes
KEPT_S = 3600.0
NAME = re.compile(r"[\w.@+=,~-]+")  # sha256sum escapes others, which are no part of trilane


def freeze(home: Path) -> Path:
    """The copy of the installed code below `home`, made where it is not there yet, repaired where it is damaged.

    Raises ValueError where it cannot be read or written, or changes all the time.
    """
    require(":" not in str(home), "run folder", home, "must hold no colon, which separates the folders of PYTHONPATH")
    try:
        files = _installed()
        sums = _sums(files)
        target = home / FOLDER / _digits(sums)
        _write(target, {**files, SUMS: sums.encode()}, revision())
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ValueError(f"code={home / FOLDER}: cannot be written ({error.strerror}{where})") from None
    return target


def fingerprint() -> str:
    """The hash of the code that is installed now."""
    return _digits(_sums(_installed()))


def discard_unused(home: Path, code: Path) -> None:
    """Remove the copies below `home`, except `code`, that no job uses or can still be given; all stay while SLURM does
    not answer."""
    now = time.time()
    others = [path for path in (home / FOLDER).glob("*") if path != code and path.is_dir()]
    jobs, ages = _jobs(home) if others else ({}, {})
    for path in others:
        ids = jobs.get(path.name, [])
        is_young = min(ages.get(path.name, now - path.stat().st_mtime), now - path.stat().st_mtime) < KEPT_S
        if is_young or None in ids:  # None: a submission whose outcome is not known
            continue
        with contextlib.suppress(ValueError, OSError):
            known = client.states([job for job in ids if job and client.JOB_ID.fullmatch(job)])
            if all(state.has_ended for state in known.values()):
                shutil.rmtree(path)


def _jobs(home: Path) -> tuple[dict[str, list[str | None]], dict[str, float]]:
    """Of each copy the jobs that were given it, None for one whose id is not known, and the age of the last in s."""
    jobs: dict[str, list[str | None]] = {}
    ages: dict[str, float] = {}
    for path in (home / ledger.NAME, *home.glob(f"*/{ledger.NAME}"), *home.glob(f"runs/*/{ledger.NAME}")):
        events = ledger.events(path.parent)
        is_open = {event["token"] for event in ledger.open_submissions(path.parent)}
        given = {str(e.get("token")): str(e["code"]) for e in events if e["event"] == "submitting" and e.get("code")}
        for event in events:
            if event["event"] == "preparing":
                jobs.setdefault(str(event.get("code")), []).append(event["id"])
            code = given.get(str(event.get("token")))
            if code and event["event"] in ("submitting", "submitted"):
                ages[code] = min(ages.get(code, float("inf")), ledger.age_s(event))
                known = list(_ids(event)) if event["event"] == "submitted" else []
                jobs.setdefault(code, []).extend(known or ([None] if event["token"] in is_open else []))
    return jobs, ages


def _ids(event: dict[str, object]) -> Iterator[str]:
    """The jobs of a "submitted" event: of a sweep's array one for each line."""
    lines = event.get("lines")
    yield from [f"{event['id']}_{line}" for line in lines] if isinstance(lines, list) else [str(event["id"])]


def _installed() -> dict[str, bytes]:
    """The files of the package and of its templates, by their path in a copy; read until they did not change."""
    sources = {"trilane": package(), "share/trilane/slurm_templates": shipped("slurm_templates")}
    for _ in range(TRIES):
        found = [(f"{name}/{path}", root / path) for name, root in sources.items() for path in _paths(root)]
        before = _stamps(path for _, path in found)
        try:
            files = {name: path.read_bytes() for name, path in found}
        except FileNotFoundError:  # an update removes it now
            continue
        if before == _stamps(path for _, path in found):
            return files
    raise ValueError(f"code={package()}: is being changed; submit when that has ended")


def _paths(root: Path) -> list[str]:
    """The files below a folder, sorted, relative to it; without what Python compiled."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__" and NAME.fullmatch(name)]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in names if NAME.fullmatch(name)]
    return sorted(found)


def _stamps(paths: Iterable[Path]) -> list[tuple[int, int]]:
    """When each file was changed, and its size; (0, 0) for one that is gone."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
            continue
        found.append((0, 0))
    return found


def _sums(files: dict[str, bytes]) -> str:
    """The files in the form of sha256sum, which the job checks them with."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))


def _digits(sums: str) -> str:
    return hashlib.sha256(sums.encode()).hexdigest()[:DIGITS]


def _write(target: Path, files: dict[str, bytes], made_of: str) -> None:
    """Write a copy under another name, then rename it; where it exists, replace the files that differ."""
    exists = target.exists()
    place = target if exists else target.with_name(f"new-{os.getpid()}-{target.name}")
    try:
        for name, data in files.items():
            path = place / name
            if exists and path.is_file() and path.read_bytes() == data:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.new")
            part.write_bytes(data)
            part.replace(path)
        if not exists:
            (place / REVISION).write_text(f"{made_of}\n", encoding="utf-8")
            place.rename(target)
    except OSError:  # a full disk; or another process was first
        if not exists:
            shutil.rmtree(place, ignore_errors=True)
        if exists or not target.exists():
            raise
