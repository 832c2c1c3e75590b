"""Saving: the state is copied between two iterations, and a thread of each rank writes its share while the training
goes on, to a temporary folder, which is renamed once all ranks have written theirs.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine import phases
from trilane.engine.backends.base import Engine, States
from trilane.engine.checkpoint.fingerprints import fingerprint, layout, read_marked
from trilane.engine.checkpoint.slices import SliceFile, boxes_of, error_text
from trilane.engine.model import rng
from trilane.engine.world import World, call_on_first, gather_values
from trilane.utils.files import replace_text
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane.workspace.fingerprints import file_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Result of a save: the checkpoint's name, bytes and seconds; or the `problem` that prevented it.

    `seconds` until the last rank had written its files, `stall_s` those in which the training stood still.
    """

    name: str
    seconds: float
    stall_s: float
    bytes: int = 0
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} could not be saved: {self.problem}"
        size = f"{self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
        return f"saved {checkpoints.FOLDER}/{self.name} ({size}, training stopped for {self.stall_s:.2f} s)"


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save that has begun, at `begin`, and this rank's `report` of it, once its thread has written."""

    batch: Batch
    folder: Path
    begin: float
    stall_s: float
    report: "Future[dict[str, Any]]"


class Saver:
    """The saves of one run, one at a time; begin() and finish() are collective and for the main thread alone."""

    def __init__(self, folder: Path, plan: Plan, world: World, engine: Engine) -> None:
        self._root, self._plan, self._world, self._engine = folder / checkpoints.FOLDER, plan, world, engine
        self._save: Save | None = None
        self._writer = ThreadPoolExecutor(1, "save")
        states = engine.states
        replica, replicas = (0, 1) if states.divided else engine.replica
        mine = (n for n, p in enumerate(states.pieces) if n % replicas == replica and not p.written_elsewhere)
        self._mine = [n for n in mine if states.shard(n) != (0, 0)]
        # Of the first save, where the plan asks for none; else taken at the start, so that its memory is known then.
        self._copy = HostCopy(states, self._mine, world.device) if plan.run.saves_at_end else None

    @property
    def begun(self) -> bool:
        """Whether a save waits for its finish()."""
        return self._save is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's thread still writes."""
        return self._save is not None and not self._save.report.done()

    def begin(self, batch: Batch, upcoming: Mapping[str, Any]) -> Saved | None:
        """Copy the state after `batch` and start to write it, with what comes next; a result only where it failed."""
        assert not self.begun
        begin, name, states = time.perf_counter(), checkpoints.name_of(batch.number), self._engine.states
        temporary, problem = try_on_first(self._world, lambda: temporary_folder(self._root, name))
        if problem:
            seconds = time.perf_counter() - begin
            return Saved(name=name, seconds=seconds, stall_s=seconds, problem=problem)
        folder = Path(temporary)
        copy = self._copy = self._copy or HostCopy(states, self._mine, self._world.device)
        parts = read_marked(states, copy.take)
        prints = fingerprint(self._plan, self._world, self._engine, batch.number, upcoming, parts)
        report = self._writer.submit(self._write, folder, begin, copy, rng.states(), prints)
        stall_s = time.perf_counter() - begin
        self._save = Save(batch=batch, folder=folder, begin=begin, stall_s=stall_s, report=report)
        return None

    def finish(self) -> Saved:
        """Wait for the threads of all ranks, and publish. A failure leaves every earlier checkpoint as it is."""
        begin, save = time.perf_counter(), self._save
        assert save
        reports = gather_values(self._world, save.report.result())
        manifest = {
            "identity": identity(self._plan),
            "layout": layout(self._plan),
            "iteration": save.batch.number,
            "consumed_samples": save.batch.end,
            # With many replicas a rank may update nothing; it has taken no steps.
            "scalars": max((report["scalars"] for report in reports), key=lambda scalars: scalars["step"]),
        }
        target = self._root / checkpoints.name_of(save.batch.number)
        size, problem = try_on_first(self._world, lambda: publish(save.folder, target, manifest, reports))
        self._save = None
        seconds, stall_s = max(report["seconds"] for report in reports), save.stall_s + time.perf_counter() - begin
        return Saved(name=target.name, bytes=size or 0, seconds=seconds, stall_s=stall_s, problem=problem)

    def keep_last(self) -> None:
        """Delete the oldest checkpoints; rank 0 alone does."""
        with contextlib.suppress(OSError):  # one checkpoint too many does no harm
            if self._world.is_first:
                checkpoints.keep_last(self._root, self._plan.run.keep_last)

    def _write(
        self, folder: Path, begin: float, copy: "HostCopy", generators: dict[str, Any], prints: dict[str, Any]
    ) -> dict[str, Any]:
        """The thread: write slices, generators and fingerprint; what was written where, or the `error`."""
        copy.wait()
        self.keep_last()
        states, rank, slices = self._engine.states, self._world.rank, []
        name = f"rank_{rank:05d}.safetensors"
        # The shape in the file is the piece's, or flat where it is a part.
        sizes = {n: (len(copy.held[n, KINDS[0]]),) if states.divided else states.pieces[n].size for n in self._mine}
        out = SliceFile(folder / name, [(f"{states.pieces[n].name}/{k}", sizes[n]) for n in self._mine for k in KINDS])
        for number in self._mine:
            piece = states.pieces[number]
            for kind in KINDS:
                out.add(copy.held[number, kind])
            for box, first, _ in boxes_of(piece.box, states.shard(number)):
                at = {kind: out.at[f"{piece.name}/{kind}"] + 4 * first for kind in KINDS}
                slices.append({"name": piece.name, "shape": piece.shape, "box": box, "file": name, "at": at})
        files, error = {name: out.close()}, out.error
        for path, content in ((folder / f"rank_{rank:05d}.json", generators), (folder / file_of(rank), prints)):
            try:
                replace_text(path, json.dumps(content))
                files[path.name] = [path.stat().st_size, checkpoints.digest(path)]
            except OSError as problem:
                error = error or error_text(problem)
        seconds = time.perf_counter() - begin
        return {"files": files, "slices": slices, "scalars": prints["scalars"], "error": error, "seconds": seconds}


class HostCopy:
    """A buffer in host memory for the pieces `written` of `states`, allocated once, and filled by each save.

    With a GPU it is page-locked, the copies run on a stream of their own, and the next optimizer step waits for them.
    """

    def __init__(self, states: States, written: Sequence[int], device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        sizes = [end - first for first, end in map(states.shard, written) for _ in KINDS]
        buffer = torch.empty(sum(sizes), dtype=torch.float32).zero_()  # real pages
        keys = ((number, kind) for number in written for kind in KINDS)
        self.held = dict(zip(keys, buffer.split(sizes) if sizes else (), strict=True))
        if self._stream:
            phases.subscribe(self._hold_optimizer)
            if sizes:  # torch's own page-locked tensors take the next power of two
                problem = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
                assert not problem, f"cudaHostRegister: error {problem} for {buffer.nbytes} bytes"

    def take(self, number: int, kind: str, values: torch.Tensor) -> None:
        """Copy the values of a piece as they are now, where this rank writes them."""
        place = self.held.get((number, kind))
        if place is None:
            return
        if not self._stream or not values.is_cuda:
            place.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        values.record_stream(self._stream)  # a gathered one is freed here, before it is copied

    def wait(self) -> None:
        """Until the copies are complete; for the thread that reads them."""
        if self._copied:
            torch.cuda.set_device(self._device)  # a thread begins with the first card of the host
            self._copied.synchronize()

    def _hold_optimizer(self, phase: str) -> None:
        """Let an optimizer step, on the stream where it runs, wait for the copies; forward and backward need not."""
        if phase == phases.OPTIMIZER and self._copied:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def try_on_first(world: World, function: Callable[[], T]) -> tuple[T, str]:
    """(result, error text) of rank 0's `function()` on all ranks; "" without an OSError."""

    def attempt() -> tuple[T | None, str]:
        try:
            return function(), ""
        except OSError as error:
            return None, error_text(error)

    return call_on_first(world, attempt)  # type: ignore[return-value]


def temporary_folder(root: Path, name: str) -> str:
    """A new temporary folder next to the checkpoints; removes what killed saves left."""
    temporary = root / f".{name}.{secrets.token_hex(4)}"
    root.mkdir(exist_ok=True)
    for path in checkpoints.leftovers(root):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    temporary.mkdir()
    return str(temporary)


def publish(temporary: Path, target: Path, manifest: dict[str, Any], reports: list[dict[str, Any]]) -> int:
    """Write the manifest and rename; the checkpoint's bytes. OSError, with nothing left of it, where that fails."""
    errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    files = {name: facts for report in reports for name, facts in report["files"].items()}
    tensors: dict[str, Any] = {}
    for piece in (piece for report in reports for piece in report["slices"]):
        tensor = tensors.setdefault(piece["name"], {"shape": piece["shape"], "slices": []})
        tensor["slices"].append({name: piece[name] for name in ("box", "file", "at")})
    try:
        if errors:
            raise OSError(errno.EIO, errors[0])
        checkpoints.write_manifest(temporary, {**manifest, "files": files, "tensors": tensors})
        checkpoints.publish(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(size for size, _ in files.values()) + os.stat(target / "manifest.json").st_size
