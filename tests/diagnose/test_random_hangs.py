"""Hangs made at random: jobs of 4 to 16 ranks run until one stops, recorded as torch does; no
innocent is named.

TRILANE_RANDOM_HANGS is their number.
"""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
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
    found, groups = list[dict[str, Any]](), {"world": grid.ranks}
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
        here, there = (
            members.index(rank),
            [members.index(r) for r in grid.group(op.axis, rank) - {rank} if p2p],
        )
        arrow = {"send": "->", "recv": "<-"}.get(op.kind, "")
        text = f"{op.kind} {here}{arrow}{there[0]}" if p2p else op.kind
        call = {"group": name, "sequence": numbers[name, p2p], "op": text, "p2p": p2p}
        closing = {**call, "state": "completed" if place < done else "started"}
        found += (
            [{**call, "state": "scheduled"}, {**closing, "op": "coalesced"}] if p2p else [closing]
        )
    return recording(found, groups)


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRILANE_RANDOM_HANGS", "40")) // 5))
@pytest.mark.parametrize(
    "kind", ["one rank stops", "two ranks stop", "a network fails", "another call", "no recording"]
)
def test_the_ranks_that_stopped_are_named_and_no_other(
    kind: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{kind} {seed}")
    grid = regular(*rng.choice(SIZES), gpus_per_node=8)
    made = {rank: program(grid, rank, microbatches=2) for rank in grid.ranks}
    # groups of one are not recorded
    programs = {
        r: [op for op in ops if op.kind == "work" or len(grid.group(op.axis, r)) > 1]
        for r, ops in made.items()
    }
    guilty = {*rng.sample(grid.ranks, 2 if kind == "two ranks stop" else 1)}
    (rank, *_), stuck = guilty, {r: rng.randrange(len(programs[r])) for r in guilty}
    place = rng.choice(
        [i for i, op in enumerate(programs[rank]) if op.kind in ("all_reduce", "broadcast")]
    )
    op = programs[rank][place]
    if kind == "a network fails":  # all members entered the call
        number, guilty = programs[rank][: place + 1].count(op), set()
        group = grid.group(op.axis, rank)
        stuck = {r: [i for i, o in enumerate(programs[r]) if o == op][number - 1] for r in group}
    elif kind == "another call":
        programs[rank][place], stuck = replace(op, kind="reduce_scatter"), {}
    for r, (done, at) in stand(grid, programs, stuck).items():
        enters = kind == "a network fails" or stuck.get(r) != done
        waits = at.kind != "work" and done < len(programs[r]) and enters
        if kind != "no recording" or r != rank:
            data = recorded(grid, r, programs[r], done, waits=waits)
            (tmp_path / f"nccl_trace_rank_{r}").write_bytes(data)
    width = rng.choice([1, 2, 4])
    hosts = rng.sample([f"rank{n}" for n in range(99)], len(grid.ranks) // width)
    topology(tmp_path, *grid.sizes, gpus_per_node=width, hosts=hosts)
    verdict = diagnose_hang(tmp_path)
    named = {r for r in verdict.suspects if OPEN not in verdict.reasons[r]}
    assert named <= guilty, verdict.paragraph
    excluded = {*verdict.exclude.removeprefix("--exclude=").split(",")} - {""}
    assert excluded <= {hosts[r // width] for r in guilty}, verdict.paragraph
    assert named or OPEN in verdict.summary() or kind == "another call"
