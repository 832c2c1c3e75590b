"""run.profile: a trace of chosen iterations and ranks, and the profiler's table."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import changed, small_plan

from trilane.analysis.benchmark import result
from trilane.cli.app import main


@pytest.mark.slow
def test_a_window_of_one_rank_is_traced_with_its_phases(
    train: Callable, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """4 microbatches in each of two iterations."""
    train(changed(small_plan(data, iters=4, tp=2), "run", profile="2-3:1"))
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["1.trace.json.gz", "1.txt"]
    with gzip.open(folder / "profile" / "1.trace.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sum(event["name"] == "forward-compute" for event in events) == 2 * 4
    table = result(folder, 0, profile=True)["profiles"]["1"]
    assert "aten::mm" in table and "optimizer" in table
    assert main(["measure", "plan", str(folder), "--leave-out", "0", "--profile"]) == 0
    assert table in capsys.readouterr().out
