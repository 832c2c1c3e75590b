"""Saving: every rank writes its share of the state to a temporary folder, which is renamed once complete."""

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
from trilane.engine.checkpoint.load import layout
from trilane.engine.checkpoint.slices import SliceFile, error_text
from trilane.engine.distributed.world import World, call_on_first, gather_values
from trilane.engine.interface import Engine
from trilane.engine.model import rng
from trilane.utils.files import replace_text
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane.workspace.fingerprints import file_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Result of a save: the checkpoint's name, bytes and seconds; or the `problem` that prevented it."""

    name: str
    bytes: int
    seconds: float
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} could not be saved: {self.problem}"
        return f"saved {checkpoints.FOLDER}/{self.name} ({self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s)"


def save(folder: Path, plan: Plan, world: World, engine: Engine, batch: Batch, upcoming: Mapping[str, Any]) -> Saved:
    """Write the checkpoint after `batch` below the run folder; collective, with the same result on all ranks.

    It contains each rank's fingerprint, with what comes next, `upcoming` (fingerprints.lookahead). A save that fails
    (a full disk) leaves every earlier checkpoint unchanged.
    """
    begin = time.perf_counter()
    root, name = folder / checkpoints.FOLDER, checkpoints.name_of(batch.number)
    temporary, problem = _try_on_first(world, lambda: _begin(root, name))
    if problem:
        return Saved(name=name, bytes=0, seconds=time.perf_counter() - begin, problem=problem)
    engine.states.finish_step()
    marks = Marks(engine.states)
    report = _write(Path(temporary), world.rank, engine, marks)
    mine = fingerprint(plan, world, engine, marks, batch.number, upcoming)
    report["error"] = report["error"] or _write_json(Path(temporary) / file_of(world.rank), mine, report["files"])
    reports = gather_values(world, report)
    manifest = {
        "identity": identity(plan),
        "layout": layout(plan),
        "iteration": batch.number,
        "consumed_samples": batch.end,
        # With many replicas a rank may update nothing; it has taken no steps.
        "scalars": max((report["scalars"] for report in reports), key=lambda scalars: scalars["step"]),
    }
    size, problem = _try_on_first(
        world, lambda: _finish(Path(temporary), root / name, manifest, reports, plan.run.keep_last)
    )
    return Saved(name=name, bytes=size or 0, seconds=time.perf_counter() - begin, problem=problem)


def _try_on_first(world: World, function: Callable[[], T]) -> tuple[T, str]:
    """(result, error text) of rank 0's `function()` on all ranks; "" without an OSError."""

    def attempt() -> tuple[T | None, str]:
        try:
            return function(), ""
        except OSError as error:
            return None, error_text(error)

    return call_on_first(world, attempt)  # type: ignore[return-value]


def _begin(root: Path, name: str) -> str:
    """A new temporary folder next to the checkpoints; removes what killed saves left."""
    temporary = root / f".{name}.{secrets.token_hex(4)}"
    root.mkdir(exist_ok=True)
    for path in checkpoints.leftovers(root):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    temporary.mkdir()
    return str(temporary)


def _write(temporary: Path, rank: int, engine: Engine, marks: Marks) -> dict[str, Any]:
    """Write this rank's files and add marks of all its pieces; what was written where, or the `error`."""
    states, (replica, replicas) = engine.states, engine.replica
    mine = [n for n, piece in enumerate(states.pieces) if n % replicas == replica and not piece.written_elsewhere]
    file = f"rank_{rank:05d}.safetensors"
    entries = [(f"{states.pieces[n].name}/{kind}", states.pieces[n].size) for n in mine for kind in KINDS]
    out = SliceFile(temporary / file, entries)
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
    error = out.error or _write_json(temporary / f"rank_{rank:05d}.json", rng.states(), files)
    return {"files": files, "slices": slices, "scalars": states.scalars(), "error": error}


def _write_json(path: Path, content: Any, files: dict[str, list[Any]]) -> str:
    """Write the file and add it to `files`; the error text, or ""."""
    try:
        replace_text(path, json.dumps(content))
        files[path.name] = [path.stat().st_size, checkpoints.digest(path)]
    except OSError as error:
        return error_text(error)
    return ""


def _finish(temporary: Path, target: Path, manifest: dict[str, Any], reports: list[dict[str, Any]], keep: int) -> int:
    """Publish the checkpoint and delete the oldest; its bytes. OSError, with nothing left of it, where that fails."""
    errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    try:
        if errors:
            raise OSError(errno.EIO, errors[0])
        files = {name: facts for report in reports for name, facts in report["files"].items()}
        checkpoints.write_manifest(temporary, {**manifest, "files": files, "tensors": _tensors(reports)})
        checkpoints.publish(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # one checkpoint too many does no harm
        checkpoints.keep_last(target.parent, keep)
    return sum(size for size, _ in files.values()) + os.stat(target / checkpoints.MANIFEST).st_size


def _tensors(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensor name -> shape of the whole and its slices."""
    tensors: dict[str, Any] = {}
    for report in reports:
        for piece in report["slices"]:
            tensor = tensors.setdefault(piece["name"], {"shape": piece["shape"], "slices": []})
            tensor["slices"].append({name: piece[name] for name in ("box", "file", "at")})
    return tensors
