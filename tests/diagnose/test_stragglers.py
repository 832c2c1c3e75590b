"""Who is slow is named by rank, node or link, and found among spares in the fewest restarts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trilane.cli.app import main
from trilane.diagnose.stragglers import NodeSearch, find_stragglers, restarts_at_most
from trilane.workspace.rank_grid import regular

GRID = regular(8, 4, 4, 8)  # 128 ranks on 16 nodes
PHASES = {"forward-compute": 1.0, "backward-compute": 2.0, "optimizer": 0.2, "p2p-wait": 0.5, "all-grads-sync": 0.4}


def times(seed: int = 0) -> dict[int, dict[str, float]]:
    """Seconds with 1 % of noise; the last stage has the head and works longer."""
    random = np.random.default_rng(seed)
    return {
        rank: {name: s * (1 + 0.2 * (GRID[rank].pp == 3)) * random.normal(1, 0.01) for name, s in PHASES.items()}
        for rank in GRID.ranks
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_rank_is_named_and_who_waits_for_it_is_not(seed: int) -> None:
    seconds = times(seed)
    seconds[37]["forward-compute"] *= 1.15
    for rank in GRID.group("tp", 37) - {37}:
        seconds[rank]["all-grads-sync"] *= 1.6
    found = find_stragglers(GRID, seconds)
    assert [(s.kind, s.name, s.phase) for s in found] == [("rank", "37", "forward-compute")]
    assert found[0].score > 5


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_node_is_one_finding(seed: int) -> None:
    seconds = times(seed)
    for rank in GRID.nodes["node5"]:
        seconds[rank]["backward-compute"] *= 1.12
    assert [(s.kind, s.name) for s in find_stragglers(GRID, seconds)] == [("node", "node5")]


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_link_is_named_by_its_two_nodes(seed: int) -> None:
    seconds = times(seed)
    one = 3
    (other,) = GRID.group("next", one) - {one}
    for rank in (one, other):
        seconds[rank]["p2p-wait"] *= 1.5
    found = find_stragglers(GRID, seconds)
    assert [(s.kind, s.ranks) for s in found] == [("link", (one, other))]
    assert found[0].name == " - ".join(sorted({GRID[one].node, GRID[other].node}))


@pytest.mark.parametrize("seed", range(50))
def test_noise_alone_names_nobody(seed: int) -> None:
    assert find_stragglers(GRID, times(seed)) == []


@pytest.mark.parametrize(("nodes", "spares"), [(48, 4), (48, 1), (40, 12), (7, 3), (2, 1), (384, 8)])
def test_every_bad_node_is_found_within_the_promised_restarts(nodes: int, spares: int) -> None:
    names = [f"n{i}" for i in range(nodes)]
    needed = []
    for bad in names:
        found = NodeSearch(suspects=tuple(names), spares=spares)
        while not found.done:
            found = found.after_run(bad in found.left_out)
        assert found.suspects == (bad,)
        needed.append(found.restarts)
    assert max(needed) == restarts_at_most(nodes, spares)
    assert max(needed) <= math.ceil(nodes / spares) - 1 + math.ceil(math.log2(spares + 1))


def test_with_enough_spares_the_search_is_a_bisection() -> None:
    assert restarts_at_most(48, 24) == math.ceil(math.log2(48))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spares": 0}, "spares=0: must be"),
        ({"suspects": ()}, "suspects=.*distinct"),
        ({"suspects": ("a", "a")}, "dist"),
    ],
)
def test_a_search_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodeSearch(**{"suspects": ("a", "b"), "spares": 1, **fields})  # type: ignore[arg-type]


def recorded(folder: Path, ranks: int = 16) -> Path:
    """A run folder of TP 1, PP 1, DP `ranks` on nodes of 8, rank 5 of which computes 30 % longer after the warm-up."""
    (folder / "ranks").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"topology": {"tp": 1, "pp": 1, "dp": ranks}, "cluster": {}}))
    for rank in range(ranks):
        lines = [
            {
                "iteration": i,
                "host": f"n{rank // 8}",
                "seconds": {"forward-compute": 9.0 if i == 1 else 1 + 0.3 * (rank == 5)},
            }
            for i in range(1, 5)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 5, "sec'
        (folder / "ranks" / f"{rank}.phases").write_text(text)
    return folder


def test_the_command_reads_a_run_and_plans_the_swaps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = recorded(tmp_path / "run")
    assert main(["debug", "stragglers", str(folder), "--json", "--spares", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(s["kind"], s["ranks"], s["phase"]) for s in found["stragglers"]] == [("rank", [5], "forward-compute")]
    assert found["stragglers"][0]["excess_s"] == pytest.approx(0.3)
    assert found["search"]["suspects"] == ["n0"] and found["search"]["exclude"] == "--exclude=n0"


def test_where_nobody_stands_out_all_nodes_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = recorded(tmp_path / "run", ranks=32)
    (folder / "ranks" / "5.phases").unlink()
    assert main(["debug", "stragglers", str(folder), "--json", "--spares", "2", "--results", "bad"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stragglers"] == [] and found["search"]["suspects"] == ["n2", "n3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "holds no phase times (ranks/*.phases); set run.timers in the plan"),
        (["--spares", "-1"], "spares=-1: must be a whole number of at least 1"),
        (["--spares", "1", "--results", "so-so"], "results=so-so: known: bad, good"),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = recorded(tmp_path / "run") if options else tmp_path
    assert main(["debug", "stragglers", str(folder), *options]) == 2
    assert capsys.readouterr().err.endswith(message + "\n")


@pytest.mark.parametrize(("seconds", "slow"), [(1.12, False), (1.16, True)])
def test_a_rank_is_slow_from_five_standard_deviations_on(seconds: float, slow: bool) -> None:
    """Median 1.00, median absolute deviation 0.02: a Gaussian's standard deviation is 0.02965, five of them 0.148."""
    times = [0.94, 0.96, 0.98, 0.98, 1.0, 1.02, 1.02, 1.04, seconds]
    found = find_stragglers(regular(1, 1, 9, 1), {rank: {"forward-compute": t} for rank, t in enumerate(times)})
    assert [s.ranks for s in found] == [(8,)] * slow


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(("share", "slow"), [(1.028, False), (1.04, True)])
def test_a_node_is_slow_from_three_percent_on_however_long_a_phase_takes(
    share: float, slow: bool, scale: float
) -> None:
    times = {rank: {"forward-compute": scale * (share if rank in (2, 3) else 1.0)} for rank in range(8)}
    assert [s.ranks for s in find_stragglers(regular(1, 1, 8, 2), times)] == [(2, 3)] * slow
