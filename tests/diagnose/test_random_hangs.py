"""Hangs made at random: jobs of 4 to 16 ranks run until one stops, recorded as torch does; no innocent is named."""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dumps import recording, topology
from job import Op, program, stand

from trilane.diagnose.hang import diagnose_hang
from trilane.diagnose.suspects import OPEN
from trilane.workspace.rank_grid import Grid, regular

SIZES = ((1, 1, 4), (2, 1, 4), (2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 2, 4), (1, 1, 8), (2, 4, 2))
Programs = dict[int, list[Op]]


def job(rng: random.Random) -> tuple[Grid, Programs]:
    """A job of one of the sizes: each rank's operations, without those of groups of one, which are not recorded."""
    grid = regular(*rng.choice(SIZES), gpus_per_node=8)
    made = {rank: program(grid, rank, microbatches=2) for rank in grid.ranks}
    return grid, {
        r: [op for op in ops if op.kind == "work" or len(grid.group(op.axis, r)) > 1] for r, ops in made.items()
    }


def calls(
    grid: Grid, rank: int, ops: list[Op], done: int, *, waits: bool
) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """What the recorder of a rank holds that has completed `done` operations and `waits` in the next; its groups."""
    found, groups, numbers = list[dict[str, Any]](), {"world": sorted(grid.ranks)}, Counter[tuple[str, bool]]()
    for place, op in enumerate(ops[: done + waits]):
        if op.kind == "work":
            continue
        p2p = op.axis in ("next", "previous")
        axis = "pp" if p2p else op.axis
        members = sorted(grid.group(axis, rank))
        name = f"{axis}{members[0]}" if axis != "world" else axis
        groups[name] = members
        numbers[name, p2p] += 1
        here, (there,) = (
            members.index(rank),
            [members.index(r) for r in grid.group(op.axis, rank) - {rank}] if p2p else [0],
        )
        text = {"send": f"send {here}->{there}", "recv": f"recv {here}<-{there}"}.get(op.kind, op.kind)
        call = {"group": name, "sequence": numbers[name, p2p], "op": text, "p2p": p2p}
        state = "completed" if place < done else "started"
        found += (
            [{**call, "state": "scheduled"}, {**call, "op": "coalesced", "state": state}]
            if p2p
            else [{**call, "state": state}]
        )
    return found, groups


def certain(
    folder: Path,
    grid: Grid,
    programs: Programs,
    stuck: dict[int, int],
    *,
    entered: bool = False,
    without: Collection[int] = (),
) -> tuple[set[int], str]:
    """The ranks that the verdict accuses without doubt, where those in `stuck` do not leave (or, unless `entered`, do
    not begin) that operation; and its paragraph."""
    for rank, (done, op) in stand(grid, programs, stuck).items():
        waits = op.kind != "work" and done < len(programs[rank]) and (entered or stuck.get(rank) != done)
        made, groups = calls(grid, rank, programs[rank], done, waits=waits)
        if rank not in without:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(recording(made, groups))
    topology(folder, *grid.sizes)
    verdict = diagnose_hang(folder)
    return {rank for rank in verdict.suspects if OPEN not in verdict.reasons[rank]}, verdict.paragraph


@pytest.mark.parametrize("seed", range(30))
def test_of_recordings_the_ranks_that_stopped_are_named_and_no_other(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    grid, programs = job(rng)
    stuck = {rank: rng.randrange(len(programs[rank])) for rank in rng.sample(grid.ranks, 1 + seed % 2)}
    named, paragraph = certain(tmp_path, grid, programs, stuck)
    assert named <= {*stuck} and (named or "cannot be determined" in paragraph), paragraph


@pytest.mark.parametrize("seed", range(20))
def test_a_network_that_fails_accuses_no_rank(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    grid, programs = job(rng)
    rank = rng.choice(grid.ranks)
    place = rng.choice([i for i, op in enumerate(programs[rank]) if op.kind in ("all_reduce", "broadcast")])
    op = programs[rank][place]
    number = programs[rank][: place + 1].count(op)
    stuck = {r: [i for i, o in enumerate(programs[r]) if o == op][number - 1] for r in grid.group(op.axis, rank)}
    named, paragraph = certain(tmp_path, grid, programs, stuck, entered=True)
    assert not named, paragraph


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_in_another_call_is_named_or_nobody(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    grid, programs = job(rng)
    rank = rng.choice(grid.ranks)
    place = rng.choice([i for i, op in enumerate(programs[rank]) if op.kind in ("all_reduce", "broadcast")])
    programs[rank][place] = replace(programs[rank][place], kind="reduce_scatter")
    named, paragraph = certain(tmp_path, grid, programs, {})
    assert named <= {rank}, paragraph


@pytest.mark.parametrize("seed", range(10))
def test_of_the_rank_that_has_no_recording_no_other_is_accused(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    grid, programs = job(rng)
    rank = rng.choice(grid.ranks)
    stuck = {rank: rng.randrange(len(programs[rank]))}
    named, paragraph = certain(tmp_path, grid, programs, stuck, without=[rank])
    assert named <= {rank}, paragraph
