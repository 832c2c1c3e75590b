"""run.profile: a trace of chosen iterations and ranks, and every operator counted for the part that it belongs to."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import HERE, changed, small_plan

from trilane.cli.app import main
from trilane.config.training import Run
from trilane.experiments.benchmark import result, shortened
from trilane.workspace.profiles import read_profiles

LAYERS, MICROBATCHES = 4, 4


@pytest.mark.slow
def test_every_product_is_counted_for_its_part(
    train: Callable, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Two products in an MLP and in attention, one in the head; each has two in the backward pass.

    Recomputation repeats those of the layers but not of the head.
    """
    plan = changed(small_plan(data, iters=4, tp=2, recompute="full"), "run", profile="2-3:1")
    train(plan)
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["1.json", "1.trace.json.gz", "1.txt"]
    with gzip.open(folder / "profile" / "1.trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    (found,) = read_profiles(folder)
    assert (found.rank, found.first, found.last) == (1, 2, 3)
    calls: Counter[str] = Counter()
    for operator in found.operators:
        if operator.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            calls[operator.part] += round(operator.calls)
    layer = LAYERS * MICROBATCHES * 2
    assert calls == {"attention": layer * 4, "MLP": layer * 4, "head and loss": MICROBATCHES * 3}
    assert all(found.by_part()[part] > 0 for part in ("norms", "embedding", "optimizer", "communication"))
    assert sum(found.by_part().values()) + found.rest == pytest.approx(found.seconds, rel=1e-6)
    assert sum(found.by_kind().values()) == pytest.approx(sum(found.by_part().values()))
    (profiled,) = result(folder, 0, profile=True)["profiles"]
    assert set(profiled["predicted_kinds"]) == set(profiled["kinds"])
    assert main(["measure", "plan", str(folder), "--leave-out", "0", "--profile"]) == 0
    assert profiled["table"] in capsys.readouterr().out


def test_a_short_run_profiles_its_last_iterations_unless_its_own_fit() -> None:
    plan = small_plan(Path("data"))
    assert shortened(plan, 10, profile=True).run.profile == "8-10"
    assert shortened(changed(plan, "run", profile="4-5"), 10, profile=True).run.profile == "4-5"
    assert shortened(changed(plan, "run", profile="12-13"), 10).run.profile == ""


MALFORMED = "must be FIRST-LAST, such as 10-12, at most 100 iterations; ranks as in 10-12:0,3"
BAD = {
    "10": MALFORMED,
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


def test_a_rank_that_the_plan_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="profile=1-2:0,2: names a rank beyond the last of 2"):
        changed(small_plan(Path("data"), dp=2), "run", profile="1-2:0,2")


def test_a_run_that_starts_after_the_window_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Before any process starts, by the name of the checkpoint."""
    plan = replace(changed(small_plan(tmp_path, iters=20), "run", profile="3-4"), cluster=HERE)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    (tmp_path / "checkpoints/iter_0000004").mkdir(parents=True)
    assert main(["train", str(tmp_path), "--resume"]) == 2
    assert "profile=3-4: the run starts after iteration 4 of " in capsys.readouterr().err
