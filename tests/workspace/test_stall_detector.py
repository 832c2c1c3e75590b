"""Who has stalled, by this node's heartbeats, the others' reports, and no clock but one's own, which the test turns."""

from pathlib import Path

import pytest

from trilane.workspace import stall_detector
from trilane.workspace.heartbeat import Heartbeat, NodeReport, encode, place
from trilane.workspace.stall_detector import StallDetector


class Cluster:
    """Two ranks on each node; the detector under test is on the first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, timeout_s: float, **options) -> None:
        self.folder, self.now, self.number = folder, 5000.0, 0
        monkeypatch.setattr(stall_detector.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(stall_detector, "read_reports", self.read)
        self.reads, self.reports = 0, list[NodeReport]()
        self.detector = StallDetector(folder, ranks, timeout_s, places=lambda: [folder], start="s", **options)

    def read(self, folder: Path) -> list[NodeReport]:
        self.reads += 1
        return self.reports

    def beat(self, *ranks: int, step: int | None = None, phase: str = "forward") -> None:
        """This node's ranks make progress."""
        for rank in ranks:
            record = encode(int(self.now) if step is None else step, phase, self.now, place())
            (self.folder / f"{rank}.beat").write_bytes(record)

    def report(self, *idle_s: float, start: str = "s", dead: int = -1) -> None:
        """The other nodes' ranks have made no progress for so long; the node `dead` writes no new report."""
        self.number += 1
        before, self.reports = self.reports, []
        for node in range(1, 1 + len(idle_s) // 2):
            ranks = tuple(
                Heartbeat(rank=r, step=7, phase="forward", time=1.0, pid=99, host=f"n{node}", idle_s=idle_s[r - 2])
                for r in (2 * node, 2 * node + 1)
            )
            made = NodeReport(first=2 * node, host=f"n{node}", start=start, number=self.number, ranks=ranks)
            self.reports.append(before[node - 1] if node == dead else made)

    def after(self, seconds: float, every_s: float = 1.0) -> str:
        """Whether the run counts as stalled, asked so often for so long."""
        found = ""
        for _ in range(int(seconds / every_s)):
            self.now += every_s
            self.detector.look()
            found = found or self.detector.decide()
        return found


@pytest.mark.parametrize(
    ("timeout_s", "step", "seconds"), [(200, 2, 200), (200, 1, 1000), (200, 0, 1000), (20, 1, 660)]
)
def test_a_rank_is_given_five_times_as_long_until_its_second_iteration(
    timeout_s: float, step: int, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles and builds samples in the first: five times the limit, and 660 s at least."""
    one = Cluster(tmp_path, monkeypatch, 1, timeout_s)
    one.beat(0, step=step)
    assert not one.after(seconds, 5.0) and one.after(10, 5.0)


def test_a_change_of_phase_is_progress_and_the_rank_without_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has finished may be silent: rank 0 writes the last checkpoint's manifest while others have ended."""
    one = Cluster(tmp_path, monkeypatch, 3, 100.0)
    one.beat(2, step=5, phase="end")
    assert not one.after(60)
    one.beat(0, 1, step=5)
    assert not one.after(90)
    one.beat(0, step=5, phase="backward")
    assert one.after(90) == "no progress for 100 s: rank 1 in iteration 5, forward"
    assert not Cluster(tmp_path, monkeypatch, 3, 0.0).after(5000, 50.0)


def test_a_rank_that_never_began_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, nobody = Cluster(tmp_path, monkeypatch, 3, 200.0), "no progress for 200 s: rank {} before its first heartbeat"
    assert one.after(1050) == nobody.format(0)
    one.beat(0, 2, step=1)
    assert one.after(1050) == nobody.format(1)


def test_the_rank_that_has_stood_still_longest_is_named_on_whichever_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's report is read while the own ranks train, and of a stall all have reported within seconds."""
    cluster = Cluster(tmp_path, monkeypatch, 6, 1000.0)
    cluster.beat(0, 1, step=7)
    cluster.report(*[5000.0] * 4, start="before")
    assert not cluster.after(1000) and not cluster.reads
    cluster.report(998.0, 997.0, 999.0, 1003.0)
    assert not cluster.after(3), "two have not stalled for so long"
    cluster.report(1001.0, 1002.0, 1003.0, 1007.0)
    assert cluster.after(2) == "no progress for 1000 s: rank 5 in iteration 7, forward"
    assert cluster.reads <= 5 and {"n1", "n2"} < cluster.detector.hosts()


def test_a_node_that_no_longer_reports_is_the_cause_once_the_others_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the others train its watchdog alone may have died: they could not without its ranks."""
    cluster = Cluster(tmp_path, monkeypatch, 6, 1000.0)
    for second in range(0, 2000, 20):
        cluster.report(*[0.1] * 4, dead=2 if second else -1)
        cluster.beat(0, 1, step=7 + second)
        assert not cluster.after(20)
    said = ""
    for second in range(0, 1040, 10):
        cluster.report(*[float(second)] * 4, dead=2)
        said = said or cluster.after(10)
    assert said == "no progress for 1000 s: rank 4 in iteration 7, forward on n2, which no longer reports"
    assert "n2" not in cluster.detector.hosts() and "n1" in cluster.detector.hosts()


def test_another_node_decides_where_that_of_rank_0_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have finished, or be gone."""
    cluster = Cluster(tmp_path, monkeypatch, 4, 1000.0, patience_s=45.0)
    cluster.beat(0, 1, step=7)
    cluster.report(0.1, 0.1)
    assert not cluster.after(1045) and not cluster.reads
    assert "rank 2 in iteration 7, forward on n1, which no longer reports" in cluster.after(40)
