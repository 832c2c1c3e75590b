"""Loading: the newest intact checkpoint that the plan may continue from, on any topology, into any
engine.
"""

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.frozen import frozen
from trilane.utils.validation import require
from trilane.workspace import checkpoints
from trilane.workspace.continuation import candidates, require_same
from trilane_engine.backends.base import MOMENTS, Engine
from trilane_engine.checkpoint.fingerprints import layout
from trilane_engine.checkpoint.slices import assemble, assemble_range
from trilane_engine.model import rng
from trilane_engine.world import World, call_on_first, gather_values


@frozen
class Checkpoint:
    """A checkpoint whose files are all intact, after `iteration` iterations."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def iteration(self) -> int:
        """Iterations completed."""
        return self.manifest["iteration"]


def find(folder: Path, plan: Plan, world: World) -> Checkpoint | None:
    """The checkpoint that the run in `folder` starts from; None where it starts from the initial
    state.

    The run's own newest; where it has none, the newest of `run.load`. Every file is checked; a
    damaged checkpoint is reported in one line and the one before it tried. ValueError, on all
    ranks, where none is intact, or where it was trained with another model or other data.
    """
    faults: list[str] = []
    for path in call_on_first(world, lambda: candidates(folder, plan)):
        try:
            manifest = call_on_first(world, lambda path=path: checkpoints.read_manifest(path))  # type: ignore[misc]
            problem = _problem(path, manifest, world)
        except ValueError as error:
            problem = str(error)
        if not problem:
            require_same(path.name, manifest, plan)
            return Checkpoint(path=path, manifest=manifest)
        faults.append(f"{path.name}: {problem}")
        if world.is_first:
            line = f"trilane: checkpoint {faults[-1]}; trying the one before"
            print(line, file=sys.stderr, flush=True)
    rule = "none of them can be used, and there is no older one"
    require(not faults, "checkpoints", "; ".join(faults), rule)
    return None


def load(checkpoint: Checkpoint, plan: Plan, world: World, engine: Engine) -> None:
    """Set the engine to the checkpoint's state: a rank reads weights of its pieces, and the moments
    that it updates.
    """
    states = engine.states
    manifest = checkpoint.manifest
    for number, piece in enumerate(states.pieces):
        slices = manifest["tensors"][piece.name]["slices"]
        shard = states.shard(number)
        weight = assemble(checkpoint.path, slices, "weight", piece.box)
        moments = {
            kind: assemble_range(checkpoint.path, slices, kind, piece.box, shard)
            for kind in MOMENTS
        }
        states.write(number, weight, moments)
    states.set_scalars(manifest["scalars"])
    if manifest["layout"] == layout(plan):
        rng.restore(json.loads((checkpoint.path / f"rank_{world.rank:05d}.json").read_text()))
    else:  # new seeds, so as not to repeat the draws of the first iterations
        rng.seed_streams(plan.run.seed + checkpoint.iteration)


def _problem(path: Path, manifest: Mapping[str, Any], world: World) -> str:
    """The first fault among the files, each checked by one rank in turn."""
    faults = []
    for number, (name, (_, checksum)) in enumerate(manifest["files"].items()):
        if number % world.size == world.rank:
            fault = checkpoints.fault(path, name, checksum)
            if fault:
                faults.append(fault)
    return next(itertools.chain(*gather_values(world, faults)), "")
