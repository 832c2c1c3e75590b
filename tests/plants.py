"""Four ways in which 384 ranks hang, each with its culprits: what is planted, and the dumps that it
leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from dumps import topology, write_all
from job import GRID, Op, elsewhere, first, program, stand


@dataclass
class Scene:
    """What a plant decided: who is to blame, what the ranks' programs are, who is stuck where, and
    who is silent.
    """

    guilty: set[int]
    programs: dict[int, list[Op]] = field(
        default_factory=lambda: {r: program(GRID, r) for r in GRID.ranks}
    )
    stuck: dict[int, int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    style: str = "mixed"


Plant = Callable[[Random], Scene]


def stuck_at(rank: int, name: str, *inner: tuple[str, str, int], **fields: Any) -> Scene:
    """A rank that never gets over the operation `name`, with `inner` on top of its stack."""
    scene = Scene({rank}, **fields)
    ops = scene.programs[rank]
    index = first(ops, name, 2)
    ops[index] = elsewhere(ops[index], *inner)
    scene.stuck[rank] = index
    return scene


def anyone(random: Random, stages: range = range(12)) -> int:
    return random.choice([r for r in GRID.ranks if GRID[r].pp in stages])


def mismatched(random: Random) -> Scene:
    rank = anyone(random)
    scene = Scene({rank})
    ops = scene.programs[rank]
    index = first(ops, "attention", 2)
    wrong = (
        ("broadcast", "torch/distributed/distributed_c10d.py", 1191),
        ("_bcast", "megatron/mpu/mappings.py", 77),
    )
    ops[index] = replace(ops[index], kind="broadcast", stack=(*wrong, *ops[index].stack[3:]))
    return scene


def data_loader(random: Random) -> Scene:
    inner = (
        ("_try_get_data", "torch/utils/data/dataloader.py", 1011),
        ("__next__", "torch/utils/data/dataloader.py", 521),
    )
    return stuck_at(anyone(random, range(1)), "data", *inner, style="text")


def node_silent(random: Random) -> Scene:
    node = random.choice(list(GRID.nodes.values()))
    scene = Scene(set(node), silent=set(node))
    scene.stuck = {r: first(scene.programs[r], "attention", 2) for r in node}
    return scene


def skipped_broadcast(random: Random) -> Scene:
    """Document 003 in large: some are in the broadcast of the loss, others already in the
    all_reduce of train.
    """
    rank = anyone(random)
    scene = Scene({rank}, style="text")
    ops = scene.programs[rank]
    del ops[first(ops, "loss")]
    return scene


PLANTS: dict[str, Plant] = {
    "a mismatched collective": mismatched,
    "a rank in the data loader": data_loader,
    "a whole node silent": node_silent,
    "a broadcast left out": skipped_broadcast,
}


def write(folder: Path, scene: Scene) -> None:
    """The dumps that the scene leaves, and its topology.json."""
    stands = stand(GRID, scene.programs, scene.stuck)
    folder.mkdir(parents=True)
    stacks = {rank: op.stack for rank, (_, op) in stands.items() if rank not in scene.silent}
    write_all(folder, stacks, scene.style)
    topology(folder, 8, 12, 4)
