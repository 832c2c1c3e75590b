"""Loading: the newest checkpoint that is whole, on any topology, into any engine."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.engine.checkpoint.identity import layout, require_same
from trilane.engine.checkpoint.slices import assemble
from trilane.engine.distributed.gather import gathered, told
from trilane.engine.distributed.world import World
from trilane.engine.interface import Engine
from trilane.engine.model import rng
from trilane.engine.model.rng import seed_streams
from trilane.utils.validation import require
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import FOLDER, KINDS


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were all found as they were written."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def iteration(self) -> int:
        """The iterations behind it."""
        return self.manifest["iteration"]


def find(folder: Path, plan: Plan, world: World) -> Checkpoint | None:
    """The checkpoint that the run in `folder` starts from; None where it starts from the beginning.

    The run's own newest one; where it has none, the newest of `run.load`. Every file of it is checked; a damaged
    checkpoint is said in one line, and the one before it is tried. ValueError, on all ranks, where none is whole, or
    where it was trained with another model or other data.
    """
    faults: list[str] = []
    for path in told(world, lambda: _candidates(folder, plan)):
        try:
            manifest = told(world, lambda path=path: checkpoints.read_manifest(path))  # type: ignore[misc]
            problem = _problem(path, manifest, world)
        except ValueError as error:
            problem = str(error)
        if not problem:
            require_same(path.name, manifest["identity"], plan, manifest["iteration"], manifest["consumed_samples"])
            return Checkpoint(path=path, manifest=manifest)
        faults.append(f"{path.name}: {problem}")
        if world.is_first:
            print(f"trilane: checkpoint {faults[-1]}; trying the one before", file=sys.stderr, flush=True)
    require(not faults, "checkpoints", "; ".join(faults), "none of them can be used, and none is older")
    return None


def load(checkpoint: Checkpoint, plan: Plan, world: World, engine: Engine) -> None:
    """Put the engine into the checkpoint's state, all ranks together; each reads the parts that it holds."""
    states, manifest = engine.states, checkpoint.manifest
    for number, piece in enumerate(states.pieces):
        slices = manifest["tensors"][piece.name]["slices"]
        states.write(number, {kind: assemble(checkpoint.path, slices, kind, piece.box) for kind in KINDS})
    states.set_scalars(manifest["scalars"])
    if manifest["layout"] == layout(plan):
        rng.restore(json.loads((checkpoint.path / f"rank_{world.rank:05d}.json").read_text()))
    else:  # other ranks draw: not once more what the first iterations drew
        seed_streams(plan.run.seed + checkpoint.iteration)


def _candidates(folder: Path, plan: Plan) -> list[Path]:
    """The checkpoints that may be used, the newest first."""
    own = checkpoints.complete(folder / FOLDER)
    if own or not plan.run.load:
        return own[::-1]
    found = checkpoints.found_in(Path(plan.run.load))
    require(bool(found), "run.load", plan.run.load, "holds no complete checkpoint")
    return found[::-1]


def _problem(path: Path, manifest: Mapping[str, Any], world: World) -> str:
    """What is wrong with the files, each of which one rank looks at; "" where nothing is."""
    mine = list(manifest["files"].items())[world.rank :: world.size]
    faults = [checkpoints.fault(path, name, size, checksum) for name, (size, checksum) in mine]
    return next((fault for found in gathered(world, faults) for fault in found if fault), "")
