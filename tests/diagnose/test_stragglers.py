"""Who is slow is named, by rank or node."""

import json

import pytest

from trilane.cli.app import main
from trilane.workspace.pace import OWN, Pace
from trilane.workspace.rank_grid import regular
from trilane_diagnose.stragglers import Straggler, find_stragglers, slowest


def test_a_rank_is_slow_from_five_standard_deviations_on():
    """Median 1.00, median absolute deviation 0.02: a Gaussian's standard deviation is 0.02965, five
    of them 0.148.
    """
    grid = regular(1, 1, 9, 1)
    for last, expected in ((1.148, []), (1.149, [8])):
        times = [0.94, 0.96, 0.98, 0.98, 1.0, 1.02, 1.02, 1.04, last]
        found = find_stragglers(grid, {r: {"forward-compute": t} for r, t in enumerate(times)})
        assert [straggler.ranks[0] for straggler in found] == expected
    assert found[0].excess_s == pytest.approx(0.149)
    assert found[0].score == pytest.approx(0.149 / (1.4826 * 0.02))
    with pytest.raises(ValueError, match=r"^rank=8: must lie below tp x pp x dp = 8"):
        find_stragglers(regular(1, 1, 8, 4), {8: {"forward-compute": 1.0}})


def names(found: list[Straggler]) -> list[str]:
    return [f"{one.kind} {one.name}" for one in found]


@pytest.mark.parametrize(
    ("share", "ranks", "found"),
    [
        (1.049, (4, 5, 7), []),
        (1.051, (4, 5, 7), ["node node1"]),
        (1.051, (4, 5), ["rank 5", "rank 4"]),
    ],
)
def test_a_node_is_slow_where_three_of_its_four_ranks_are(share: float, ranks: tuple, found: list):
    """Who waits for a slow rank communicates longer, and is not named. The last stage has the head,
    and works longer.
    """
    times = {}
    for rank in range(32):
        slower = share + rank / 1e6 if rank in ranks else 1.0
        times[rank] = {"optimizer": (1 + rank // 16) * slower, "p2p-wait": 1.0 + (rank == 2)}
    assert names(find_stragglers(regular(1, 2, 16, 4), times)) == found


DISK = "the shared disk, since batch-generator takes 3 s longer on"


@pytest.mark.parametrize(
    ("phase", "excess", "width", "ranks", "words"),
    [
        (2, (0, 0, 3.0, 1.5), 2, (2, 3), "ranks 2-3 on node1, backward-compute takes 2.25 s"),
        (2, (0, 0, 3.0, 1.4), 2, (2,), "ranks 2 on node1, backward-compute takes 3 s"),
        (0, (3.0, 0, 3.0, 0), 2, (), f"{DISK} 2 ranks"),
        (1, (3.0, 3.0, 3.0, 0), 2, (), "all ranks alike, forward-compute takes 3 s longer"),
        (1, (0, 0.31, 0, 0), 2, (1,), "ranks 1 on node0"),
        (1, (0, 0.29, 0, 0), 2, (), "communication"),
    ],
)
def test_who_works_longer_than_before_is_at_fault(
    phase: int, excess: tuple, ranks: tuple, words: str, width: int
):
    """Two stages of two replicas, on one or two nodes, by 3 s; a rank that waits does not work
    longer.
    """
    paces = {}
    for rank, seconds in enumerate(excess):
        own = [0.0] * len(OWN)
        own[phase] = seconds
        paces[rank] = Pace(late=10, usual_s=1.0, now_s=4.0, excess_s=tuple(own))
    line, guilty = slowest({rank: f"node{rank // width}" for rank in range(4)}, paces)
    assert guilty == ranks and line.startswith(words)


def test_the_command_reads_a_run_and_refuses_a_folder_without_times(tmp_path, capsys):
    """Rank 5 of 16 computes 30 % longer after the warm-up."""
    (tmp_path / "ranks").mkdir()
    assert main(["debug", "stragglers", str(tmp_path)]) == 2
    assert "holds no phase times (ranks/*.phases)" in capsys.readouterr().err
    plan = {"topology": {"tp": 1, "pp": 1, "dp": 16}, "cluster": {}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for rank in range(16):
        lines = []
        for iteration in range(1, 5):
            own = 9.0 if iteration == 1 else 1 + 0.3 * (rank == 5)
            times = {"iteration": iteration, "host": "n", "seconds": {"forward-compute": own}}
            lines.append(json.dumps(times))
        (tmp_path / f"ranks/{rank}.phases").write_text("\n".join(lines))
    assert main(["debug", "stragglers", str(tmp_path), "--json"]) == 0
    (slow,) = json.loads(capsys.readouterr().out)["stragglers"]
    assert (slow["kind"], slow["ranks"], slow["excess_s"]) == ("rank", [5], pytest.approx(0.3))
