"""Saving: the state is copied between two iterations, and a thread of each rank writes its share while the training
goes on, to a temporary folder, which is renamed once all ranks have written theirs.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.checkpoint.fingerprints import Marks, facts, fingerprint
from trilane.engine.checkpoint.host_copy import HostCopy
from trilane.engine.checkpoint.load import layout
from trilane.engine.checkpoint.publish import publish, temporary_folder, try_on_first, write_listed
from trilane.engine.checkpoint.slices import FLOAT_BYTES, SliceFile, boxes_of
from trilane.engine.distributed.world import World, gather_values
from trilane.engine.interface import Engine
from trilane.engine.model import rng
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane.workspace.fingerprints import COPY, file_of


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
    """A save that has begun: what this rank's thread has been given, and in `report` what it has done."""

    iteration: int
    consumed: int
    folder: Path
    marks: Marks
    facts: dict[str, Any]
    generators: dict[str, Any]
    begin: float
    thread: threading.Thread
    stall_s: float = 0.0
    report: dict[str, Any] | None = None
    failure: BaseException | None = None


class Saver:
    """The saves of one run, one at a time; begin() and finish() are collective and for the main thread alone."""

    def __init__(self, folder: Path, plan: Plan, world: World, engine: Engine) -> None:
        self._root, self._plan, self._world, self._engine = folder / checkpoints.FOLDER, plan, world, engine
        self._copy: HostCopy | None = None
        self._save: Save | None = None
        self._deletion: threading.Thread | None = None
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
        return self._save is not None and self._save.thread.is_alive()

    def begin(self, batch: Batch, upcoming: Mapping[str, Any]) -> Saved | None:
        """Copy the state after `batch` and start to write it below the run folder; a result only where that failed.

        The checkpoint contains each rank's fingerprint, with what comes next, `upcoming` (fingerprints.lookahead).
        """
        assert not self.begun
        begin, name = time.perf_counter(), checkpoints.name_of(batch.number)
        self._wait_for_deletion()
        temporary, problem = try_on_first(self._world, lambda: temporary_folder(self._root, name))
        if problem:
            seconds = time.perf_counter() - begin
            return Saved(name=name, bytes=0, seconds=seconds, stall_s=seconds, problem=problem)
        states = self._engine.states
        marks = Marks(states)
        copy = self._allocate()
        copy.take(marks)
        self._save = Save(
            iteration=batch.number,
            consumed=batch.end,
            folder=Path(temporary),
            marks=marks,
            facts=facts(self._plan, self._world, self._engine, batch.number, upcoming),
            generators=rng.states(),
            begin=begin,
            thread=threading.Thread(target=self._write, args=(copy,), name="save", daemon=True),
        )
        self._save.thread.start()
        self._save.stall_s = time.perf_counter() - begin
        return None

    def finish(self) -> Saved:
        """Wait for the threads of all ranks, and publish; the same result on all ranks.

        A save that failed (a full disk) leaves every earlier checkpoint unchanged.
        """
        assert self._save
        begin, save = time.perf_counter(), self._save
        save.thread.join()
        if save.failure:
            raise save.failure
        assert save.report is not None
        reports = gather_values(self._world, save.report)
        manifest = {
            "identity": identity(self._plan),
            "layout": layout(self._plan),
            "iteration": save.iteration,
            "consumed_samples": save.consumed,
            # With many replicas a rank may update nothing; it has taken no steps.
            "scalars": max((report["scalars"] for report in reports), key=lambda scalars: scalars["step"]),
        }
        name = checkpoints.name_of(save.iteration)
        size, problem = try_on_first(self._world, lambda: publish(save.folder, self._root / name, manifest, reports))
        self._save, now = None, time.perf_counter()
        if not problem and self._world.is_first:
            self._delete_old()
        seconds, stall_s = max(report["seconds"] for report in reports), save.stall_s + now - begin
        return Saved(name=name, bytes=size or 0, seconds=seconds, stall_s=stall_s, problem=problem)

    def close(self) -> None:
        """Wait until old checkpoints are deleted."""
        self._wait_for_deletion()

    def _allocate(self) -> HostCopy:
        """The buffer of copies, the same in all saves; allocated at the start where the plan saves."""
        if self._copy is None:
            device, offload = self._world.device, self._plan.topology.offload
            on_host = device.type == "cpu" or (offload != "none" and self._engine.states.divided)
            self._copy = HostCopy(self._engine.states, self._mine, device, on_host=on_host)
        return self._copy

    def _write(self, copy: HostCopy) -> None:
        """The thread: write this rank's files. No phase and no collective; finish() raises what it raises."""
        save = self._save
        assert save
        try:
            copy.wait()
            save.report = self._files(save, copy)
            save.report["seconds"] = time.perf_counter() - save.begin
        except BaseException as error:
            save.failure = error

    def _files(self, save: Save, copy: HostCopy) -> dict[str, Any]:
        """Write slices, generators and fingerprint; what was written where, or the `error`."""
        states, mine, rank = self._engine.states, set(self._mine), self._world.rank
        file = f"rank_{rank:05d}.safetensors"
        out = SliceFile(
            save.folder / file,
            [(f"{states.pieces[n].name}/{kind}", self._size(n)) for n in self._mine for kind in KINDS],
        )
        with ThreadPoolExecutor(1) as marking:
            marked = [marking.submit(save.marks.add, *held) for held in copy.held() if not save.marks.has(*held[:2])]
            for number, kind, values in copy.held():
                if number in mine and kind != COPY:
                    out.add(values)
        for future in marked:
            future.result()
        files, slices = {file: out.close()}, []
        for number in self._mine:
            piece = states.pieces[number]
            at = {kind: out.at[f"{piece.name}/{kind}"] for kind in KINDS}
            for box, first, _ in boxes_of(piece.box, states.shard(number)):
                there = {kind: start + FLOAT_BYTES * first for kind, start in at.items()}
                slices.append({"name": piece.name, "shape": piece.shape, "box": box, "file": file, "at": there})
        error = out.error
        for name, content in (
            (f"rank_{rank:05d}.json", save.generators),
            (file_of(rank), fingerprint(save.facts, save.marks)),
        ):
            error = error or write_listed(save.folder / name, content, files)
        return {"files": files, "slices": slices, "scalars": save.facts["scalars"], "error": error}

    def _size(self, number: int) -> tuple[int, ...]:
        """The shape in the file of what this rank writes of a piece: the piece's, or flat where it is a part."""
        piece, (first, end) = self._engine.states.pieces[number], self._engine.states.shard(number)
        return (end - first,) if self._engine.states.divided else piece.size

    def _delete_old(self) -> None:
        """Delete the oldest checkpoints, which takes seconds where they are large, in a thread."""
        keep = self._plan.run.keep_last

        def delete() -> None:
            with contextlib.suppress(OSError):  # one checkpoint too many does no harm
                checkpoints.keep_last(self._root, keep)

        self._deletion = threading.Thread(target=delete, name="delete", daemon=True)
        self._deletion.start()

    def _wait_for_deletion(self) -> None:
        if self._deletion:
            self._deletion.join()
