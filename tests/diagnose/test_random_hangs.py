"""Hangs made at random: jobs of 4 to 16 ranks run until one stops, recorded as torch does; no innocent is named."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dumps import recording, topology

from trilane.diagnose.hang.suspects import OPEN
from trilane.diagnose.hang.verdict import Verdict, diagnose_hang

Op = tuple[str, str]  # group and operation; "send 0->1" and "recv 1<-0" number the stages
SIZES = ((1, 1, 4), (2, 1, 4), (2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 2, 4), (1, 1, 8), (2, 4, 2))


class Job:
    """The program of each rank: in two iterations two microbatches forth and back; then dp and the world reduce."""

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        self.sizes, self.ranks = (tp, pp, dp), range(tp * pp * dp)
        self.members: dict[str, list[int]] = {"world": [*self.ranks]}
        for rank in self.ranks:
            for name in self.groups(rank):
                self.members.setdefault(name, []).append(rank) if name != "world" else None
        self.programs = [self.program(rank) for rank in self.ranks]

    def groups(self, rank: int) -> tuple[str, str, str, str]:
        tp, _, dp = self.sizes
        t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
        return "world", f"tp{d}.{p}", f"pp{t}.{d}", f"dp{t}.{p}"

    def program(self, rank: int) -> list[Op]:
        tp, pp, dp = self.sizes
        world, over_tp, over_pp, over_dp = self.groups(rank)
        stage, ops = rank // (tp * dp), list[Op]()
        for turn, direction in enumerate([1, 1, -1, -1] * 2):
            before, after = stage - direction, stage + direction
            ops += [(over_pp, f"recv {stage}<-{before}")] if 0 <= before < pp else []
            ops += [(over_tp, "all_reduce")] * 2 if tp > 1 else []
            ops += [(over_pp, f"send {stage}->{after}")] if 0 <= after < pp else []
            if turn % 4 == 3:
                ops += [(over_dp, "_reduce_scatter_base"), (over_dp, "_allgather_base")] if dp > 1 else []
                ops.append((world, "all_reduce"))
        return ops

    def number(self, rank: int, place: int) -> int:
        """The number of an operation among those of its group, sends and receives by themselves."""
        group, op = self.programs[rank][place]
        same = [o for g, o in self.programs[rank][: place + 1] if g == group and is_p2p(o) == is_p2p(op)]
        return len(same)

    def run(self, stopped: Mapping[int, int], broken: tuple[str, int] | None = None) -> tuple[list[int], list[int]]:
        """How many operations each rank has completed, and the last it has entered, once nothing moves: a rank in
        `stopped` does not enter that one, and the collective of a group and number in `broken` does not end."""
        done, entered, moved = [0 for _ in self.ranks], [-1 for _ in self.ranks], True
        while moved:
            moved = False
            for rank in self.ranks:
                if done[rank] < len(self.programs[rank]) and stopped.get(rank) != done[rank]:
                    moved |= entered[rank] < done[rank]
                    entered[rank] = done[rank]
                    if self.ends(rank, entered, broken):
                        done[rank], moved = done[rank] + 1, True
        return done, entered

    def ends(self, rank: int, entered: list[int], broken: tuple[str, int] | None) -> bool:
        group, op = self.programs[rank][entered[rank]]
        if is_p2p(op):
            kind, stages = op.split()
            here, there = map(int, stages.replace("<-", "->").split("->"))
            peer = self.members[group][there]
            other = f"recv {there}<-{here}" if kind == "send" else f"send {there}->{here}"
            mine = self.programs[rank][: entered[rank] + 1].count((group, op))
            return self.programs[peer][: entered[peer] + 1].count((group, other)) >= mine
        number = self.number(rank, entered[rank])
        calls = [[o for o in self.programs[r][: entered[r] + 1] if o[0] == group] for r in self.members[group]]
        same = all(len(made) >= number and made[number - 1][1] == op for made in calls)
        return same and (group, number) != broken

    def calls(self, rank: int, done: int, entered: int) -> list[dict[str, Any]]:
        found = []
        for place in range(max(done, entered + 1)):
            group, op = self.programs[rank][place]
            state = "completed" if place < done else "started"
            call = {"group": group, "sequence": self.number(rank, place), "op": op, "state": state, "p2p": is_p2p(op)}
            found += [{**call, "state": "scheduled"}, {**call, "op": "coalesced"}] if is_p2p(op) else [call]
        return found

    def judged(self, folder: Path, done: list[int], entered: list[int], without: int = -1) -> Verdict:
        for rank in {*self.ranks} - {without}:
            groups = {name: self.members[name] for name in self.groups(rank)}
            data = recording(self.calls(rank, done[rank], entered[rank]), groups)
            (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
        topology(folder, *self.sizes)
        return diagnose_hang(folder)


def is_p2p(op: str) -> bool:
    return op.startswith(("send", "recv"))


def certain(verdict: Verdict) -> set[int]:
    return {rank for rank in verdict.suspects if OPEN not in verdict.reasons[rank]}


@pytest.mark.parametrize("seed", range(30))
def test_of_recordings_the_ranks_that_stopped_are_named_and_no_other(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    job = Job(*rng.choice(SIZES))
    culprits = rng.sample(job.ranks, 1 + seed % 2)
    verdict = job.judged(tmp_path, *job.run({r: rng.randrange(len(job.programs[r])) for r in culprits}))
    assert certain(verdict) and certain(verdict) <= {*culprits}, verdict.paragraph


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_in_another_call_and_a_network_that_fails_accuse_no_innocent(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    job = Job(*rng.choice(SIZES))
    rank = rng.choice(job.ranks)
    place = rng.choice([i for i, (_, op) in enumerate(job.programs[rank]) if not is_p2p(op)])
    group = job.programs[rank][place][0]
    if seed % 2:
        broken, guilty = (group, job.number(rank, place)), set[int]()
    else:
        job.programs[rank][place] = (group, "broadcast")
        broken, guilty = None, {rank}
    verdict = job.judged(tmp_path, *job.run({}, broken))
    assert certain(verdict) <= guilty, verdict.paragraph


@pytest.mark.parametrize("seed", range(10))
def test_of_the_rank_that_has_no_recording_no_other_is_accused(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    job = Job(*rng.choice(SIZES))
    rank = rng.choice(job.ranks)
    verdict = job.judged(tmp_path, *job.run({rank: rng.randrange(len(job.programs[rank]))}), without=rank)
    assert certain(verdict) <= {rank}, verdict.paragraph
