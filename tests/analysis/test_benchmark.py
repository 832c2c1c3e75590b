"""A benchmark is a run whose first iterations are left out, told as one JSON object."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from support import small_plan

from trilane.analysis.measure import measure
from trilane.cli.app import main

LINE = (
    " iteration {0}/7 | elapsed time per iteration (ms): {1} | global batch size: {2} | lm loss: 2.5 | "
    "number of skipped iterations: {3} |\n"
)
MEMORY = "[Rank {}] (after 9 iterations) memory (MB) | allocated: 1.0 | max allocated: {}.0 | reserved: 1.0\n"


def test_the_first_the_skipped_and_those_of_a_smaller_batch_are_left_out(tmp_path: Path) -> None:
    seconds = {1: 9.0, 2: 9.0, 3: 7.0, 4: 1.0, 5: 2.0, 6: 50.0, 7: 3.0}
    lines = [LINE.format(i, 1000 * s, 2 if i == 3 else 4, int(i == 6)) for i, s in seconds.items()]
    log = "".join(lines) + MEMORY.format(0, 7) + MEMORY.format(1, 8)
    (tmp_path / "plan.json").write_text(json.dumps(small_plan().to_json()))
    (tmp_path / "run.log").write_text(log)
    found = measure(tmp_path)
    assert (len(found.log.iterations), found.iterations) == (7, 3)
    assert (found.sec_per_it, found.tokens_per_s) == (2, 4 * 32 / 2)
    assert found.memory_bytes == 8 * 2**20
    flops = small_plan().shape.flops_per_iteration(4)
    assert found.flops_per_s["narayanan"] == pytest.approx(flops / 2)
    assert math.isnan(found.mfu), "what a CPU was measured to do is no peak"


@pytest.mark.parametrize(("options", "count"), [(["--iterations", "5"], 5), ([], 4)])
def test_a_benchmark_without_an_iteration_to_count_is_refused(
    options: list[str], count: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small_plan().to_json()))
    assert main(["measure", "plan", str(path), *options]) == 2
    message = f"iterations={count}: must be above 5, of the warm-up"
    assert capsys.readouterr().err == f"trilane: {message}\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_the_command_trains_and_prints_exactly_one_object(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, plan = tmp_path / "small.json", small_plan(train_iters=9999)
    path.write_text(json.dumps(replace(plan, data=replace(plan.data, folder=str(data))).to_json()))
    assert main(["measure", "plan", str(path), "--iterations", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iterations_counted"], found["status"]) == (4, "completed")
    assert main(["measure", "plan", str(tmp_path / "small-benchmark-8")]) == 0
    assert "completed" in capsys.readouterr().out
