"""run.profile: a trace of chosen iterations and ranks, and the profiler's table."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import HERE, changed, small_plan

from trilane.analysis.benchmark import result, shortened
from trilane.cli.app import main
from trilane.config.training import Run


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
    assert "aten::addmm" in table and "optimizer" in table
    assert main(["measure", "plan", str(folder), "--leave-out", "0", "--profile"]) == 0
    assert table in capsys.readouterr().out


def test_a_short_run_profiles_its_last_iterations_unless_its_own_fit() -> None:
    plan = small_plan(Path("data"))
    assert shortened(plan, 10, profile=True).run.profile == "8-10"
    assert shortened(changed(plan, "run", profile="4-5"), 10, profile=True).run.profile == "4-5"
    assert shortened(changed(plan, "run", profile="12-13"), 10).run.profile == ""


MALFORMED = "must be FIRST-LAST, such as 10-12, at most 100 iterations; ranks as in 10-12:0,3"
BAD = {
    "12-10": MALFORMED,
    "0-3": MALFORMED,
    "1-101": MALFORMED,
    "10-12:a": MALFORMED,
    "49-51": "must lie between iterations 1 and 50, which this plan trains",
    "18-21": "must begin and end outside of skip=20-22",
}


@pytest.mark.parametrize(("window", "rule"), BAD.items())
def test_a_window_that_is_never_reached_is_refused(window: str, rule: str) -> None:
    with pytest.raises(ValueError) as error:
        Run(profile=window, skip="20-22")
    assert str(error.value) == f"profile={window}: {rule}"


def test_a_run_that_starts_after_the_window_or_lacks_its_rank_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Before any process starts, by the name of the checkpoint."""
    with pytest.raises(ValueError, match="profile=1-2:0,2: names a rank beyond the last of 2"):
        changed(small_plan(Path("data"), dp=2), "run", profile="1-2:0,2")
    plan = replace(changed(small_plan(tmp_path, iters=20), "run", profile="3-4"), cluster=HERE)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    (tmp_path / "checkpoints/iter_0000004").mkdir(parents=True)
    assert main(["train", str(tmp_path), "--resume"]) == 2
    assert "profile=3-4: the run starts after iteration 4 of " in capsys.readouterr().err
