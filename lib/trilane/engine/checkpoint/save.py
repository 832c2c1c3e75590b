"""Saving: the state is copied between two iterations, and a thread of each rank writes its share while the training
goes on, to a temporary folder, which is renamed once all ranks have written theirs.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine import phases
from trilane.engine.backends.base import Engine, States
from trilane.engine.checkpoint.fingerprints import Marks, facts, fingerprint, layout, readings
from trilane.engine.checkpoint.slices import SliceFile, boxes_of, error_text
from trilane.engine.model import rng
from trilane.engine.world import World, call_on_first, gather_values
from trilane.utils.files import replace_text
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane.workspace.fingerprints import COPY, file_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Result of a save: the checkpoint's name, bytes and seconds; or the `problem` that prevented it.

    `seconds` until the last rank had written its files, `stall_s` those in which the training stood still.
    """

    name: str
    bytes: int
    seconds: float
    stall_s: float
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} could not be saved: {self.problem}"
        size = f"{self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s"
        return f"saved {checkpoints.FOLDER}/{self.name} ({size}, training stopped for {self.stall_s:.2f} s)"


@dataclass(kw_only=True)
class Save:
    """A save that has begun: what this rank's thread has been given, and its `report`, once it has one."""

    batch: Batch
    folder: Path
    marks: Marks
    facts: dict[str, Any]
    generators: dict[str, Any]
    begin: float
    stall_s: float = 0.0
    report: "Future[dict[str, Any]] | None" = None


class Saver:
    """The saves of one run, one at a time; begin() and finish() are collective and for the main thread alone."""

    def __init__(self, folder: Path, plan: Plan, world: World, engine: Engine) -> None:
        self._root, self._plan, self._world, self._engine = folder / checkpoints.FOLDER, plan, world, engine
        self._copy: HostCopy | None = None
        self._save: Save | None = None
        self._writer = ThreadPoolExecutor(1, "save")
        replica, replicas = (0, 1) if engine.states.divided else engine.replica
        pieces = engine.states.pieces
        mine = (n for n, piece in enumerate(pieces) if n % replicas == replica and not piece.written_elsewhere)
        self._mine = [n for n in mine if engine.states.shard(n) != (0, 0)]
        if plan.run.saves_at_end:
            self._allocate()

    @property
    def begun(self) -> bool:
        """Whether a save waits for its finish()."""
        return self._save is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's thread still writes."""
        return bool(self._save and self._save.report and not self._save.report.done())

    def begin(self, batch: Batch, upcoming: Mapping[str, Any]) -> Saved | None:
        """Copy the state after `batch` and start to write it below the run folder; a result only where that failed.

        The checkpoint contains each rank's fingerprint, with what comes next, `upcoming` (fingerprints.lookahead).
        """
        assert not self.begun
        begin, name = time.perf_counter(), checkpoints.name_of(batch.number)
        temporary, problem = try_on_first(self._world, lambda: temporary_folder(self._root, name))
        if problem:
            seconds = time.perf_counter() - begin
            return Saved(name=name, bytes=0, seconds=seconds, stall_s=seconds, problem=problem)
        marks, copy = Marks(self._engine.states), self._allocate()
        copy.take(marks)
        known = facts(self._plan, self._world, self._engine, batch.number, upcoming)
        self._save = Save(
            batch=batch, folder=Path(temporary), marks=marks, facts=known, generators=rng.states(), begin=begin
        )
        self._save.report = self._writer.submit(self._write, self._save, copy)
        self._save.stall_s = time.perf_counter() - begin
        return None

    def finish(self) -> Saved:
        """Wait for the threads of all ranks, and publish; the same result on all ranks.

        A save that failed (a full disk) leaves every earlier checkpoint unchanged.
        """
        begin, save = time.perf_counter(), self._save
        assert save and save.report
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

    def close(self) -> None:
        """Delete the oldest checkpoints."""
        if self._world.is_first:
            self._keep_last()

    def _allocate(self) -> "HostCopy":
        """The buffer of copies, the same in all saves; allocated at the start where the plan saves."""
        if self._copy is None:
            device, offload = self._world.device, self._plan.topology.offload
            on_host = device.type == "cpu" or (offload != "none" and self._engine.states.divided)
            self._copy = HostCopy(self._engine.states, self._mine, device, on_host=on_host)
        return self._copy

    def _write(self, save: Save, copy: "HostCopy") -> dict[str, Any]:
        """The thread: write slices, generators and fingerprint; what was written where, or the `error`.

        No phase and no collective. First the surplus of earlier saves goes, which takes seconds where it is large.
        """
        copy.wait()
        if self._world.is_first:
            self._keep_last()
        states, mine, rank = self._engine.states, set(self._mine), self._world.rank
        file = f"rank_{rank:05d}.safetensors"
        out = SliceFile(
            save.folder / file,
            [(f"{states.pieces[n].name}/{kind}", self._size(n)) for n in self._mine for kind in KINDS],
        )
        for number, kind, values in copy.held():
            if number in mine and kind != COPY:
                out.add(values)
            if not save.marks.has(number, kind):
                save.marks.add(number, kind, values)
        files, slices = {file: out.close()}, []
        for number in self._mine:
            piece = states.pieces[number]
            for box, first, _ in boxes_of(piece.box, states.shard(number)):
                at = {kind: out.at[f"{piece.name}/{kind}"] + 4 * first for kind in KINDS}
                slices.append({"name": piece.name, "shape": piece.shape, "box": box, "file": file, "at": at})
        error, prints = out.error, fingerprint(save.facts, save.marks)
        for name, content in ((f"rank_{rank:05d}.json", save.generators), (file_of(rank), prints)):
            error = error or write_listed(save.folder / name, content, files)
        written = {"files": files, "slices": slices, "scalars": save.facts["scalars"], "error": error}
        return {**written, "seconds": time.perf_counter() - save.begin}

    def _size(self, number: int) -> tuple[int, ...]:
        """The shape in the file of what this rank writes of a piece: the piece's, or flat where it is a part."""
        piece, (first, end) = self._engine.states.pieces[number], self._engine.states.shard(number)
        return (end - first,) if self._engine.states.divided else piece.size

    def _keep_last(self) -> None:
        with contextlib.suppress(OSError):  # one checkpoint too many does no harm
            checkpoints.keep_last(self._root, self._plan.run.keep_last)


class HostCopy:
    """A buffer in host memory for the pieces `written` of `states`, taken once, and filled by each take().

    Without a GPU also for what is only fingerprinted, which a GPU does where the state is. On a GPU the buffer is
    page-locked, the copies run on a stream of their own, and the next optimizer step waits for them.
    """

    def __init__(self, states: States, written: Iterable[int], device: torch.device, *, on_host: bool) -> None:
        self._states, self._device = states, device
        self._places: dict[tuple[int, str], slice] = {}
        end, written = 0, set(written)
        for number, piece in enumerate(states.pieces):
            first, last = states.shard(number)
            sizes = dict.fromkeys(KINDS, last - first) if number in written or on_host else {}
            if device.type == "cpu" and states.copy(number) is not None:
                sizes[COPY] = math.prod(piece.size)
            for kind, size in sizes.items():
                self._places[number, kind] = slice(end, end + size)
                end += size
        self._buffer = torch.empty(end, dtype=torch.float32).zero_()  # real pages
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            phases.subscribe(self._hold_optimizer)
            if end:  # torch's own page-locked tensors take the next power of two
                problem = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), self._buffer.nbytes, 0))
                assert not problem, f"cudaHostRegister: error {problem} for {self._buffer.nbytes} bytes"

    def take(self, marks: Marks) -> None:
        """Copy the state as it is now, and mark what lies on a GPU; collective where the engine gathers its pieces."""
        for number, kind, values in readings(self._states):
            if values.is_cuda:
                marks.add(number, kind, values)
            place = self._places.get((number, kind))
            if place is None:
                continue
            if not values.is_cuda:
                self._buffer[place].copy_(values)
                continue
            assert self._stream
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._buffer[place].copy_(values, non_blocking=True)
            values.record_stream(self._stream)  # a gathered one is freed here, before it is copied
        if self._stream:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Until the copies are complete; for the thread that reads them."""
        if self._copied:
            torch.cuda.set_device(self._device)  # a thread begins with the first card of the host
            self._copied.synchronize()

    def held(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """What was copied: number of the piece, kind, and its values, flat."""
        for (number, kind), place in self._places.items():
            yield number, kind, self._buffer[place]

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


def write_listed(path: Path, content: Any, files: dict[str, list[Any]]) -> str:
    """Write the file and add it to `files`; the error text, or ""."""
    try:
        replace_text(path, json.dumps(content))
        files[path.name] = [path.stat().st_size, checkpoints.digest(path)]
    except OSError as error:
        return error_text(error)
    return ""


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
    return sum(size for size, _ in files.values()) + os.stat(target / checkpoints.MANIFEST).st_size
