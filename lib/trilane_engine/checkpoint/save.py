"""Saving: the state is copied between two iterations, and a thread of each rank writes its share
while the training goes on, to a temporary folder, which is renamed once all ranks have written
theirs.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.utils.files import replace_text
from trilane.utils.frozen import frozen
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.continuation import identity
from trilane.workspace.fingerprints import file_of
from trilane_engine.backends.base import Engine, States
from trilane_engine.checkpoint.fingerprints import fingerprint, layout, read_marked
from trilane_engine.checkpoint.slices import boxes_of, write_slices
from trilane_engine.model import rng
from trilane_engine.model.experts import replica
from trilane_engine.world import World, call_on_first, gather_values

# number of the piece and kind -> its values in host memory
Held = dict[tuple[int, str], Tensor]


@frozen
class Saved:
    """Result of a save: the checkpoint's name, bytes and seconds; or the `problem` that prevented
    it.

    `seconds` until the last rank had written its files, `stall_s` those in which the training stood
    still.
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
        stall = f"training stopped for {self.stall_s:.2f} s"
        return f"saved {checkpoints.FOLDER}/{self.name} ({size}, {stall})"


@frozen
class Save:
    """A save that has begun, and this rank's `report` of it, once its thread has written."""

    batch: Batch
    folder: Path
    stall_s: float
    report: "Future[dict[str, Any]]"


class Saver:
    """The saves of one run, one at a time; begin() and finish() are collective and for the main
    thread alone.
    """

    def __init__(self, folder: Path, plan: Plan, world: World, engine: Engine) -> None:
        self._root = folder / checkpoints.FOLDER
        self._plan = plan
        self._world = world
        self._engine = engine
        self._save: Save | None = None
        self._writer = ThreadPoolExecutor(1, "save")
        states = engine.states
        self._mine: list[int] = []
        for number, piece in enumerate(states.pieces):
            place, holders = replica(piece.name, states.divided)
            takes_turn = number % holders == place
            if takes_turn and not piece.written_elsewhere and states.shard(number) != (0, 0):
                self._mine.append(number)
        self._copy = HostCopy(states, self._mine, world.device)  # its memory is known at the start

    @property
    def begun(self) -> bool:
        """Whether a save waits for its finish()."""
        return self._save is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's thread still writes."""
        return self._save is not None and not self._save.report.done()

    def begin(self, batch: Batch, upcoming: Mapping[str, Any]) -> Saved | None:
        """Copy the state after `batch` and start to write it, with what comes next; a result only
        where it failed.
        """
        assert not self.begun
        begin = time.perf_counter()
        name = checkpoints.name_of(batch.number)
        states = self._engine.states
        try:
            folder = call_on_first(self._world, lambda: _temporary_folder(self._root, name))
        except OSError as error:
            seconds = time.perf_counter() - begin
            return Saved(name=name, seconds=seconds, stall_s=seconds, problem=f"{error.strerror}")
        parts = read_marked(states, self._copy.take)
        prints = fingerprint(self._plan, self._world, self._engine, batch.number, upcoming)
        prints["parts"] = parts
        held = self._copy.held
        report = self._writer.submit(self._write, folder, begin, held, rng.states(), prints)
        stall_s = time.perf_counter() - begin
        self._save = Save(batch=batch, folder=folder, stall_s=stall_s, report=report)
        return None

    def finish(self) -> Saved:
        """Wait for the threads of all ranks, and publish. A failure leaves every earlier checkpoint
        as it is.
        """
        begin = time.perf_counter()
        save = self._save
        assert save
        reports = gather_values(self._world, save.report.result())
        scalars = [report["scalars"] for report in reports]
        manifest = {
            "identity": identity(self._plan),
            "layout": layout(self._plan),
            "iteration": save.batch.number,
            "consumed_samples": save.batch.end,
            # With many replicas a rank may update nothing; it has taken no steps.
            "scalars": max(scalars, key=lambda values: values["step"]),
        }
        target = self._root / checkpoints.name_of(save.batch.number)
        self._save = None
        size = 0
        problem = ""
        try:
            size = call_on_first(
                self._world, lambda: _publish(save.folder, target, manifest, reports)
            )
        except OSError as error:
            problem = f"{error.strerror}"
        return Saved(
            name=target.name,
            bytes=size,
            seconds=max(report["seconds"] for report in reports),
            stall_s=save.stall_s + time.perf_counter() - begin,
            problem=problem,
        )

    def keep_last(self) -> None:
        """Delete the oldest checkpoints; rank 0 alone does."""
        with contextlib.suppress(OSError):  # one checkpoint too many does no harm
            if self._world.is_first:
                checkpoints.keep_last(self._root, self._plan.run.keep_last)

    def _write(
        self, folder: Path, begin: float, held: Held, generators: Any, prints: dict[str, Any]
    ) -> Any:
        """The thread: write slices, generators and fingerprint; what was written where, or the
        `error`.
        """
        self.keep_last()
        states = self._engine.states
        rank = self._world.rank
        files: dict[str, Any] = {}
        slices: list[Any] = []
        error = ""
        name = f"rank_{rank:05d}.safetensors"
        entries = []
        for number in self._mine:
            piece = states.pieces[number]
            entries += [(f"{piece.name}/{kind}", (len(held[number, kind]),)) for kind in KINDS]
        values = (held[number, kind] for number in self._mine for kind in KINDS)
        try:
            begins, files[name] = write_slices(folder / name, entries, values)
            for number in self._mine:
                piece = states.pieces[number]
                for box, first, _ in boxes_of(piece.box, states.shard(number)):
                    at = {kind: begins[f"{piece.name}/{kind}"] + 4 * first for kind in KINDS}
                    place = {"box": box, "file": name, "at": at}
                    slices.append({"name": piece.name, "shape": piece.shape, **place})
            texts = {f"rank_{rank:05d}.json": generators, file_of(rank): prints}
            for text_name, content in texts.items():
                path = replace_text(folder / text_name, json.dumps(content))
                files[text_name] = [path.stat().st_size, checkpoints.digest(path)]
        except OSError as problem:
            error = f"{problem.strerror}"
        return {
            "files": files,
            "slices": slices,
            "scalars": prints["scalars"],
            "error": error,
            "seconds": time.perf_counter() - begin,
        }


class HostCopy:
    """A buffer in host memory for the pieces `written` of `states`, allocated once, and filled by
    each save.
    """

    def __init__(self, states: States, written: Sequence[int], device: torch.device) -> None:
        sizes: dict[tuple[int, str], int] = {}
        for number in written:
            first, end = states.shard(number)
            sizes |= dict.fromkeys([(number, kind) for kind in KINDS], end - first)
        buffer = torch.empty(sum(sizes.values()), dtype=torch.float32).zero_()  # real pages
        parts = buffer.split([*sizes.values()]) if sizes else ()
        self.held: Held = dict(zip(sizes, parts, strict=True))
        # page-locked, a card copies at the full rate of its bus; torch's own such tensors take the
        # next power of two
        if sizes and device.type == "cuda":
            problem = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
            assert not problem, f"cudaHostRegister: error {problem} for {buffer.nbytes} bytes"

    def take(self, number: int, kind: str, values: Tensor) -> None:
        """Copy the values of a piece as they are now, where this rank writes them."""
        # The training waits for this copy, not for disk: 0.3 s for the 6 GB of 5e8 parameters at 20
        # GB/s. To overlap even that takes a stream of its own, and an event for which the next
        # optimizer step waits.
        if (number, kind) in self.held:
            self.held[number, kind].copy_(values)


def _temporary_folder(root: Path, name: str) -> Path:
    """A new temporary folder next to the checkpoints; removes what killed saves left."""
    temporary = root / f".{name}.{secrets.token_hex(4)}"
    root.mkdir(exist_ok=True)
    for path in checkpoints.leftovers(root):
        shutil.rmtree(path)
    temporary.mkdir()
    return temporary


def _publish(
    temporary: Path, target: Path, manifest: dict[str, Any], reports: list[dict[str, Any]]
) -> int:
    """Write the manifest and rename; the checkpoint's bytes. OSError, with nothing left of it,
    where that fails.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for report in reports:
        files |= report["files"]
        for piece in report["slices"]:
            tensor = tensors.setdefault(piece["name"], {"shape": piece["shape"], "slices": []})
            tensor["slices"].append({name: piece[name] for name in ("box", "file", "at")})
    try:
        for rank, report in enumerate(reports):
            if report["error"]:
                raise OSError(errno.EIO, f"rank {rank}: {report['error']}")
        checkpoints.write_manifest(temporary, {**manifest, "files": files, "tensors": tensors})
        checkpoints.publish(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(size for size, _ in files.values()) + os.stat(target / "manifest.json").st_size
