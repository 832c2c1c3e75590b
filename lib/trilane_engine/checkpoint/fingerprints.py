"""Fingerprints of this rank's state: marks of its tensors, and all else that a restart must
restore.
"""

import contextlib
import functools
import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from trilane.config.plan import Plan
from trilane.utils.files import numbered, replace_text
from trilane.utils.validation import to_mapping
from trilane.workspace import fingerprints
from trilane.workspace.checkpoints import KINDS, name_of
from trilane.workspace.fingerprints import COPY, Box, Mark, Part, file_of
from trilane_engine.backends.base import Engine, States
from trilane_engine.checkpoint.marks import mark
from trilane_engine.checkpoint.slices import boxes_of
from trilane_engine.data.samples import SampleLoader
from trilane_engine.model import rng
from trilane_engine.world import World, call_on_first


def read_marked(
    states: States, keep: Callable[[int, str, Tensor], None] = lambda *_: None
) -> list[Any]:
    """Read this rank's pieces, collective, and give them to `keep`; their Parts as JSON."""
    states.finish_step()
    parts = []
    for number, (piece, decay) in enumerate(zip(states.pieces, states.decays(), strict=True)):
        shard = states.shard(number)
        marks: dict[str, Mark] = {}
        for kind in (*KINDS, COPY):
            if kind == COPY:
                held = states.copy(number)
            else:
                held = states.read(number, kind)
            if held is None:
                continue
            values = held.detach().reshape(-1)
            keep(number, kind, values)
            boxes = boxes_of(piece.box, (0, len(values)) if kind == COPY else shard)
            if boxes:
                marks[kind] = _marked(values, boxes)
        part = Part(
            name=piece.name,
            shape=piece.shape,
            box=piece.box,
            decay=decay,
            shard=shard if states.divided else None,
            marks=marks,
        )
        parts.append(part.to_json())
    return parts


def _marked(values: Tensor, boxes: Sequence[tuple[Box, int, int]]) -> Mark:
    parts = (mark(values[at : at + n].view([b - a for a, b in box]), box) for box, at, n in boxes)
    return functools.reduce(operator.add, parts)


def lookahead(plan: Plan, loader: SampleLoader, done: int) -> dict[str, Any]:
    """The learning rate of the next iteration, and a hash of this replica's samples in it; None
    after the last.

    It is a sum over samples mod 2^64: the replicas' hashes add up to the batch's, however it is
    divided.
    """
    batch = next(plan.batches(done), None)
    if batch is None:
        return {"next_lr": None, "samples": None}
    lr = plan.optimizer.learning_rate(batch.end, plan.samples)
    total = 0
    if parallel_state.get_context_parallel_rank() == 0:
        for microbatch in loader.microbatches(batch):
            for row in microbatch.tokens.cpu().numpy():
                digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
                total += int.from_bytes(digest, "little")
    return {"next_lr": lr, "samples": f"{total % 2**64:016x}"}


def layout(plan: Plan) -> list[Any]:
    """What must be the same for each rank to restore its own random number generators."""
    t = plan.topology
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [plan.engine, t.tp, t.pp, t.dp * t.cp, t.interleaving, device]


def fingerprint(
    plan: Plan, world: World, engine: Engine, iteration: int, upcoming: Mapping[str, Any]
) -> dict[str, Any]:
    """The rank's fingerprint as JSON, but for its `parts`: coordinates, training, and all other
    state to restore.
    """
    return {
        "rank": world.rank,
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(with_context_parallel=True),
        "iteration": iteration,
        "consumed_samples": plan.run.ramp.consumed(iteration, plan.topology.gbs),
        "layout": layout(plan),
        "world": world.size,
        "precision": plan.topology.precision,
        "shape": to_mapping(plan.shape),
        "optimizer": to_mapping(plan.optimizer),
        "scalars": engine.states.scalars(),
        **upcoming,
        "generators": fingerprints.hashed(rng.states()),
    }


def write_loaded(
    folder: Path,
    plan: Plan,
    world: World,
    engine: Engine,
    iteration: int,
    upcoming: Mapping[str, Any],
) -> None:
    """Write fingerprints of the state in memory after a load below the run folder; collective."""
    parts = read_marked(engine.states)
    text = json.dumps({**fingerprint(plan, world, engine, iteration, upcoming), "parts": parts})
    prefix = f"{name_of(iteration).replace('iter', 'load')}."
    with contextlib.suppress(OSError):  # a full disk does not prevent training
        path = call_on_first(world, lambda: numbered(folder / "fingerprints", prefix, Path.mkdir))
        replace_text(path / file_of(world.rank), text)
