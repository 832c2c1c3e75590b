"""A benchmark is a short run, told as one JSON object."""

import json
from dataclasses import replace

import pytest
from support import small_plan

from trilane.cli.app import main


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_the_command_trains_and_prints_exactly_one_object(data, tmp_path, capsys):
    path, plan = tmp_path / "small.json", small_plan(train_iters=9999)
    path.write_text(json.dumps(replace(plan, data=replace(plan.data, folder=str(data))).to_json()))
    assert main(f"measure plan {path} --iterations 8 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iterations_counted"], found["status"]) == (4, "completed")
    assert main(["measure", "plan", f"{tmp_path}/small-benchmark-8"]) == 0
    assert "completed" in capsys.readouterr().out
