"""Who has stalled on many nodes: by this node's heartbeats, the others' reports, and no clock but one's own."""

from pathlib import Path
from typing import Any

import pytest

from trilane.workspace import node_folder, stall_detector
from trilane.workspace.heartbeat import Heartbeat, NodeReport, Progress, encode, forget_reports, place, read_beats
from trilane.workspace.stall_detector import StallDetector

T = 1000.0  # the timeout, s


class Cluster:
    """Two ranks on each of four nodes; the detector under test is on the first, or on another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, node: int = 0) -> None:
        self.folder, self.now, self.number, self.own = folder / "run", 5000.0, 0, folder / "own"
        (self.folder / node_folder.NODES).mkdir(parents=True)
        self.own.mkdir()
        monkeypatch.setattr(stall_detector.time, "monotonic", lambda: self.now)
        patience_s = 15.0 if node else 0.0
        self.detector = self.made(8, leads=node == 0, patience_s=patience_s)

    def made(self, ranks: int, **options: Any) -> StallDetector:
        return StallDetector(self.folder, ranks, T, places=lambda: [self.own], start="s", **options)

    def beat(self, *ranks: int, phase: str = "forward") -> None:
        """This node's ranks make progress."""
        for rank in ranks:
            (self.own / f"{rank}.beat").write_bytes(encode(int(self.now), phase, self.now, place()))

    def report(self, node: int, *idle_s: float, start: str = "s", clock_s: float = 0.0) -> None:
        """A node's ranks have made no progress for so long."""
        self.number += 1
        beats = [
            Heartbeat(rank=2 * node + i, step=7, phase="forward", time=clock_s, pid=99, host=f"n{node}")
            for i in range(len(idle_s))
        ]
        ranks = tuple(Progress(beat=beat, idle_s=idle) for beat, idle in zip(beats, idle_s, strict=True))
        NodeReport(first=2 * node, host=f"n{node}", start=start, number=self.number, ranks=ranks).write(self.folder)

    def after(self, seconds: float, every_s: float = 1.0) -> str:
        """Whether the run counts as stalled, asked every second for so long."""
        found = ""
        for _ in range(int(seconds / every_s)):
            self.now += every_s
            found = found or self.detector.stalled()
        return found


def test_the_rank_that_has_stood_still_longest_is_named_on_whichever_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own node measures for how long, so that reports which come late, or a clock an hour ahead, accuse nobody."""
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.beat(0, 1)
    for node in (1, 2, 3):
        cluster.report(node, 0.2, 0.3, clock_s=3600.0 * node)
    assert not cluster.after(T - 5)
    cluster.report(1, 998.0, 997.0), cluster.report(2, 997.0, 999.0), cluster.report(3, 3.0, 997.0)
    assert not cluster.after(4)
    cluster.report(1, 1001.0, 1000.0), cluster.report(2, 1000.5, 1003.0), cluster.report(3, 4.0, 1000.0)
    assert cluster.after(10) == "no progress for 1000 s: rank 5 in iteration 7, forward"


def test_a_stall_elsewhere_is_found_though_this_nodes_ranks_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.beat(0, 1, phase="end")
    for second in range(0, 1200, 15):
        for node in (1, 2, 3):
            cluster.report(node, 5.0, float(second) if node == 2 else 5.0)
        assert not (said := cluster.after(15)) or second > T
    assert said == "no progress for 1000 s: rank 5 in iteration 7, forward"
    for node in (1, 2, 3):
        cluster.report(node, 5.0, 5.0)
    assert cluster.after(1100, every_s=5.0).endswith(", which no longer reports"), "of those that died meanwhile"


@pytest.mark.parametrize("trains", [True, False])
def test_a_node_that_no_longer_reports_is_noticed_and_is_the_cause_once_the_others_stall(
    trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the others train its watchdog alone may have died: they could not without its ranks."""
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.report(2, 0.1, 0.1)
    found = ""
    for second in range(0, 1500, 20):
        if trains or second < 60:
            cluster.beat(0, 1)
        for node in (1, 3):
            cluster.report(node, *[0.1 if trains else float(second)] * 2)
        found = found or cluster.after(20, every_s=5.0)
    assert list(cluster.detector.silent()) == [4] and "n2" not in cluster.detector.hosts()
    wanted = "no progress for 1000 s: rank 4 in iteration 7, forward on n2, which no longer reports"
    assert found == ("" if trains else wanted)


def test_another_node_decides_where_that_of_rank_0_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no report before, and does not wait for the stacks of a node that has died."""
    cluster = Cluster(tmp_path, monkeypatch, node=2)
    reads, real = list[Path](), stall_detector.read_reports
    monkeypatch.setattr(stall_detector, "read_reports", lambda folder: reads.append(folder) or real(folder))
    monkeypatch.setattr(stall_detector, "read_report", lambda path: reads.append(path))
    cluster.beat(4, 5)
    cluster.report(0, 0.1, 0.1)
    assert not cluster.after(T + 14) and not reads
    for _ in range(5):
        cluster.report(1, 1001.0, 1001.0), cluster.report(3, 1001.0, 1001.0)
        said = cluster.after(1)
    assert said.startswith("no progress for 1000 s: rank ") and reads
    assert {"n1", "n3"} <= cluster.detector.hosts() and "n0" not in cluster.detector.hosts()


def test_the_reports_of_an_earlier_start_are_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on without a node has fewer reports than before."""
    cluster = Cluster(tmp_path, monkeypatch)
    for node in (1, 2, 3):
        cluster.report(node, 5000.0, 5000.0, start="before")
    cluster.beat(0, 1)
    assert not cluster.after(900)
    cluster.report(1, 0.5, 0.5)
    forget_reports(cluster.folder, "s")
    assert sorted(read_beats(cluster.folder)) == [2, 3]


@pytest.mark.parametrize("nodes", [8, 128])
def test_reports_cost_the_shared_file_system_less_than_one_open_a_second(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the node that reads all others', and however many these are."""
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.detector = cluster.made(2 * nodes)
    calls = list[object]()
    for name in ("read_report", "report_paths"):
        real = getattr(stall_detector, name)
        monkeypatch.setattr(stall_detector, name, lambda path, real=real: calls.append(path) or real(path))
    for node in range(1, nodes):
        cluster.report(node, 0.1, 0.1)
    cluster.beat(0, 1)
    assert not cluster.after(150, every_s=0.5)
    assert nodes == 8 or not cluster.detector.silent(), "not read again yet"
    assert not cluster.after(150, every_s=0.5)
    assert nodes < len(calls) < 0.75 * 300
