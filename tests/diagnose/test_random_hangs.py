"""Hangs made at random: jobs of 4 to 16 ranks run until one stops, recorded as torch does; no
innocent is named.

TRILANE_RANDOM_HANGS is their number.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from dumps import recording, topology
from job import Op, program, stand

from trilane.workspace.rank_grid import Grid, regular
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.suspects import OPEN

SIZES = ((1, 1, 4), (2, 1, 4), (2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 2, 4), (1, 1, 8), (2, 4, 2))


def recorded(grid: Grid, rank: int, ops: list[Op], done: int, *, waits: bool) -> bytes:
    """What the recorder of a rank holds that has completed `done` operations and `waits` in the
    next.
    """
    calls: list[dict[str, Any]] = []
    groups = {"world": grid.ranks}
    numbers = Counter[tuple[str, bool]]()
    for place, op in enumerate(ops[: done + waits]):
        if op.kind == "work":
            continue
        p2p = op.axis in ("next", "previous")
        axis = "pp" if p2p else op.axis
        members = sorted(grid.group(axis, rank))
        name = f"{axis}{members[0]}" if axis != "world" else axis
        groups[name] = members
        numbers[name, p2p] += 1
        call = {"group": name, "sequence": numbers[name, p2p], "op": op.kind, "p2p": p2p}
        call["state"] = "completed" if place < done else "started"
        if p2p:
            (there,) = grid.group(op.axis, rank) - {rank}
            arrow = {"send": "->", "recv": "<-"}[op.kind]
            text = f"{op.kind} {members.index(rank)}{arrow}{members.index(there)}"
            calls.append({**call, "op": text, "state": "scheduled"})
            call["op"] = "coalesced"
        calls.append(call)
    return recording(calls, groups)


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRILANE_RANDOM_HANGS", "24")) // 3))
@pytest.mark.parametrize("kind", ["one rank stops", "two ranks stop", "a network fails"])
def test_the_ranks_that_stopped_are_named_and_no_other(kind: str, seed: int, tmp_path):
    rng = random.Random(f"{kind} {seed}")
    sizes = rng.choice(SIZES)
    grid = regular(*sizes, gpus_per_node=8)
    programs = {}
    for rank in grid.ranks:
        ops = program(grid, rank, microbatches=2)
        # groups of one are not recorded
        programs[rank] = [
            op for op in ops if op.kind == "work" or len(grid.group(op.axis, rank)) > 1
        ]
    guilty = {*rng.sample(grid.ranks, 2 if kind == "two ranks stop" else 1)}
    stuck = {rank: rng.randrange(len(programs[rank])) for rank in guilty}
    if kind == "a network fails":  # all members entered the call
        rank = guilty.pop()
        own = programs[rank]
        place = rng.choice(
            [i for i, op in enumerate(own) if op.kind in ("all_reduce", "broadcast")]
        )
        op = own[place]
        number = own[:place].count(op)
        stuck = {}
        for member in grid.group(op.axis, rank):
            places = [i for i, other in enumerate(programs[member]) if other == op]
            stuck[member] = places[number]
    for rank, (done, at) in stand(grid, programs, stuck).items():
        enters = not guilty or stuck.get(rank) != done
        waits = at.kind != "work" and done < len(programs[rank]) and enters
        data = recorded(grid, rank, programs[rank], done, waits=waits)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    width = rng.choice([1, 2, 4])
    hosts = rng.sample([f"rank{n}" for n in range(99)], len(grid.ranks) // width)
    topology(tmp_path, *sizes, gpus_per_node=width, hosts=hosts)
    verdict = diagnose_hang(tmp_path)
    named = {rank for rank in verdict.suspects if OPEN not in verdict.reasons[rank]}
    assert named <= guilty, verdict.paragraph
    excluded = {*verdict.exclude.removeprefix("--exclude=").split(",")} - {""}
    assert excluded <= {hosts[rank // width] for rank in guilty}, verdict.paragraph
    assert named or OPEN in verdict.summary()
