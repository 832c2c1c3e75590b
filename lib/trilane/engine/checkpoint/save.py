"""Saving: every rank writes its share of the state aside; what is complete gets its name at once, or never."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.checkpoint.fingerprints import Marks, fingerprint
from trilane.engine.checkpoint.identity import identity, layout
from trilane.engine.checkpoint.slices import SliceFile, said
from trilane.engine.distributed.gather import gathered, told
from trilane.engine.distributed.world import World
from trilane.engine.interface import Engine
from trilane.engine.model import rng
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import file_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What became of a save: the checkpoint's name, its bytes, how long it took; or why there is none."""

    name: str
    bytes: int
    seconds: float
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} could not be saved: {self.problem}"
        return f"saved {checkpoints.FOLDER}/{self.name} ({self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s)"


def save(folder: Path, plan: Plan, world: World, engine: Engine, batch: Batch, ahead: Mapping[str, Any]) -> Saved:
    """Write the checkpoint after `batch` below the run folder; all ranks together, all are told what became of it.

    Each rank's fingerprint lies in it, with `ahead`, what comes next (fingerprints.outlook).
    A save that fails (a full disk) leaves every earlier checkpoint as it was.
    """
    begin = time.perf_counter()
    root, name = folder / checkpoints.FOLDER, checkpoints.name_of(batch.number)
    aside, problem = _asked(world, lambda: _begin(root, name))
    if problem:
        return Saved(name=name, bytes=0, seconds=time.perf_counter() - begin, problem=problem)
    engine.states.settle()
    marks = Marks(engine.states)
    report = _write(Path(aside), world.rank, engine, marks)
    mine = fingerprint(plan, world, engine, marks, batch.number, ahead)
    report["error"] = report["error"] or _write_json(Path(aside) / file_of(world.rank), mine, report["files"])
    reports = gathered(world, report)
    manifest = {
        "identity": identity(plan),
        "layout": layout(plan),
        "iteration": batch.number,
        "consumed_samples": batch.end,
        # A rank that updates nothing, as with many replicas some may, has taken no steps.
        "scalars": max((report["scalars"] for report in reports), key=lambda scalars: scalars["step"]),
    }
    size, problem = _asked(world, lambda: _finish(Path(aside), root / name, manifest, reports, plan.run.keep_last))
    return Saved(name=name, bytes=size or 0, seconds=time.perf_counter() - begin, problem=problem)


def _asked(world: World, act: Callable[[], T]) -> tuple[T, str]:
    """What rank 0's act gave, and what the system had against it ("": nothing), on all ranks."""

    def act_here() -> tuple[T | None, str]:
        try:
            return act(), ""
        except OSError as error:
            return None, said(error)

    return told(world, act_here)  # type: ignore[return-value]


def _begin(root: Path, name: str) -> str:
    """A new folder beside the checkpoints, once what killed saves left is gone."""
    aside = root / f".{name}.{secrets.token_hex(4)}"
    root.mkdir(exist_ok=True)
    for path in checkpoints.leftovers(root):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    aside.mkdir()
    return str(aside)


def _write(aside: Path, rank: int, engine: Engine, marks: Marks) -> dict[str, Any]:
    """This rank's files, and marks of all it holds; what it wrote where, or the `error` that stopped it."""
    states, (replica, replicas) = engine.states, engine.replica
    mine = [n for n, piece in enumerate(states.pieces) if n % replicas == replica and not piece.spoken_for]
    file = f"rank_{rank:05d}.safetensors"
    entries = [(f"{states.pieces[n].name}/{kind}", states.pieces[n].size) for n in mine for kind in KINDS]
    out = SliceFile(aside / file, entries)
    for number in range(len(states.pieces)):
        for kind in KINDS:
            tensor = states.read(number, kind)
            marks.add(number, kind, tensor)
            if number in mine:
                out.add(tensor)
    files, slices = {file: out.close()}, []
    for piece in (states.pieces[n] for n in mine):
        at = {kind: out.at[f"{piece.name}/{kind}"] for kind in KINDS}
        slices.append({"name": piece.name, "shape": piece.shape, "box": piece.box, "file": file, "at": at})
    error = out.error or _write_json(aside / f"rank_{rank:05d}.json", rng.states(), files)
    return {"files": files, "slices": slices, "scalars": states.scalars(), "error": error}


def _write_json(path: Path, content: Any, files: dict[str, list[Any]]) -> str:
    """Write the file and add it to `files`; the error, "" where there is none."""
    try:
        checkpoints.write_durably(path, json.dumps(content))
        files[path.name] = [path.stat().st_size, checkpoints.digest(path)]
    except OSError as error:
        return said(error)
    return ""


def _finish(aside: Path, target: Path, manifest: dict[str, Any], reports: list[dict[str, Any]], keep: int) -> int:
    """Publish the checkpoint and delete the oldest; its bytes. OSError, and nothing left of it, where that fails."""
    errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    try:
        if errors:
            raise OSError(errno.EIO, errors[0])
        files = {name: facts for report in reports for name, facts in report["files"].items()}
        checkpoints.write_manifest(aside, {**manifest, "files": files, "tensors": _tensors(reports)})
        checkpoints.publish(aside, target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # one too many does no harm
        checkpoints.keep_last(target.parent, keep)
    return sum(size for size, _ in files.values()) + os.stat(target / checkpoints.MANIFEST).st_size


def _tensors(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Name -> shape of the whole and its slices."""
    tensors: dict[str, Any] = {}
    for report in reports:
        for piece in report["slices"]:
            tensor = tensors.setdefault(piece["name"], {"shape": piece["shape"], "slices": []})
            tensor["slices"].append({name: piece[name] for name in ("box", "file", "at")})
    return tensors
