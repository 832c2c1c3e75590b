"""Fingerprints of this rank's state: marks of its tensors, and all else that a restart must restore.

Marks are computed on the tensors' device and equal those of workspace.fingerprints.mark.
"""

import contextlib
import functools
import hashlib
import json
import operator
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from trilane.config.plan import Plan
from trilane.engine.backends.base import Engine, States
from trilane.engine.checkpoint.slices import boxes_of
from trilane.engine.data.samples import SampleLoader
from trilane.engine.model import rng
from trilane.engine.world import World, call_on_first
from trilane.utils.files import replace_text
from trilane.utils.validation import to_mapping
from trilane.workspace import fingerprints
from trilane.workspace.checkpoints import KINDS, name_of
from trilane.workspace.fingerprints import COPY, FOLDER, SKETCHES, WORD, Box, Mark, Part, file_of, sides, weights


def readings(states: States) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Number of the piece, kind and values, flat, of all that this rank reads; collective."""
    states.finish_step()
    for number in range(len(states.pieces)):
        for kind in KINDS:
            yield number, kind, states.read(number, kind).detach().reshape(-1)
        copy = states.copy(number)
        if copy is not None:
            yield number, COPY, copy.detach().reshape(-1)


class Marks:
    """Marks of what a rank reads of its pieces, collected one by one; and the weight decay of each as it is now."""

    def __init__(self, states: States) -> None:
        self._pieces, self._decays = states.pieces, states.decays()
        self._shards = [states.shard(number) for number in range(len(states.pieces))]
        self._divided, self.seconds = states.divided, 0.0
        self._found: list[dict[str, Mark]] = [{} for _ in states.pieces]

    def has(self, number: int, kind: str) -> bool:
        """Whether piece `number` of `kind` is marked."""
        return kind in self._found[number]

    def add(self, number: int, kind: str, values: torch.Tensor) -> None:
        """Mark piece `number` of `kind`, of which `values`, flat, are this rank's shard; of COPY the whole."""
        begin, piece = time.perf_counter(), self._pieces[number]
        shard = (0, len(values)) if kind == COPY else self._shards[number]
        found = [
            mark(values[at : at + n].view([end - first for first, end in box]), box)
            for box, at, n in boxes_of(piece.box, shard)
        ]
        if found:
            self._found[number][kind] = functools.reduce(operator.add, found)
        self.seconds += time.perf_counter() - begin

    def parts(self) -> list[Part]:
        """The marks of each piece."""
        return [
            Part(name=p.name, shape=p.shape, box=p.box, decay=d, marks=found, shard=shard if self._divided else None)
            for p, found, d, shard in zip(self._pieces, self._found, self._decays, self._shards, strict=True)
        ]


def lookahead(plan: Plan, loader: SampleLoader, done: int) -> dict[str, Any]:
    """The learning rate of the next iteration, and a hash of this replica's samples in it; None after the last.

    On a middle pipeline stage, which reads no samples, the hash is None. It is a sum over samples mod 2^64: the
    replicas' hashes add up to the batch's, however it is divided.
    """
    batch = next(plan.batches(done), None)
    if batch is None:
        return {"next_lr": None, "samples": None}
    samples, lr = 0, plan.optimizer.learning_rate(batch.end, plan.samples)
    if not loader.reads:
        return {"next_lr": lr, "samples": None}
    for microbatch in loader.microbatches(batch):
        for row in microbatch.tokens.cpu().numpy():
            samples += int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")
    return {"next_lr": lr, "samples": f"{samples % WORD:016x}"}


def layout(plan: Plan) -> list[Any]:
    """What must be the same for each rank to restore its own random number generators."""
    t = plan.topology
    return [plan.engine, t.tp, t.pp, t.dp, t.interleaving]


def facts(plan: Plan, world: World, engine: Engine, iteration: int, upcoming: Mapping[str, Any]) -> dict[str, Any]:
    """The rank's fingerprint as JSON, but for its marks: coordinates, training, and all other state to restore."""
    return {
        "rank": world.rank,
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": engine.replica[0],
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


def fingerprint(known: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    """The whole fingerprint: `facts` and marks."""
    return {**known, "parts": [part.to_json() for part in marks.parts()], "seconds": round(marks.seconds, 6)}


def write_loaded(
    folder: Path, plan: Plan, world: World, engine: Engine, iteration: int, upcoming: Mapping[str, Any]
) -> None:
    """Write fingerprints of the state in memory after a load below the run folder; collective.

    A full disk does not prevent training.
    """
    marks = Marks(engine.states)
    for reading in readings(engine.states):
        marks.add(*reading)
    text = json.dumps(fingerprint(facts(plan, world, engine, iteration, upcoming), marks))
    path = call_on_first(world, lambda: _fresh(folder, iteration))
    with contextlib.suppress(OSError):
        if path:
            replace_text(Path(path) / file_of(world.rank), text)


def _fresh(folder: Path, iteration: int) -> str:
    """A new folder for the fingerprints of a load; "" where it cannot be made."""
    name, number = name_of(iteration).replace("iter", "load"), 2
    path = folder / FOLDER / name
    while path.exists():
        path, number = path.with_name(f"{name}.{number}"), number + 1
    with contextlib.suppress(OSError):
        path.mkdir(parents=True)
    return str(path) if path.exists() else ""


def mark(part: torch.Tensor, box: Box) -> Mark:
    """The Mark of `part`, the part `box` of its tensor; from a GPU only a few numbers are copied."""
    values = part.detach().to(torch.float32)
    return mark_on_device(values, box) if values.is_cuda else fingerprints.mark(values.numpy(), box)


def mark_on_device(part: torch.Tensor, box: Box) -> Mark:
    """The same in torch, on the device of `part`, fp32."""
    if len(box) == 3:
        return functools.reduce(operator.add, map(mark_on_device, part, fingerprints.planes(box)))
    (first, end), (left, right) = sides(box)
    x = part.reshape(end - first, right - left).contiguous()
    u, s = (torch.from_numpy(side).to(x.device) for side in weights(first, end, 1))
    v, t = (torch.from_numpy(side).to(x.device) for side in weights(left, right, 2))
    rows = max(1, (1 << 24) // x.shape[1])  # at a time: its temporaries are 16 bytes for each value
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    floats = torch.zeros(2 + SKETCHES, dtype=torch.float64, device=x.device)
    for at in range(0, len(x), rows):
        block = x[at : at + rows]
        found += ((block.view(torch.int32) * v).sum(1) * u[at : at + rows]).sum()
        floats[0] += torch.linalg.vector_norm(block, dim=1).double().square().sum()
        floats[1] += block.sum(dtype=torch.float64)
        floats[2:] += ((block @ t) * s[at : at + rows]).sum(0, dtype=torch.float64)
    low, high = torch.stack(torch.aminmax(x)).tolist()
    squares, total, *sketch = floats.tolist()
    return Mark(hash=int(found.item()) % WORD, squares=squares, total=total, low=low, high=high, sketch=tuple(sketch))
