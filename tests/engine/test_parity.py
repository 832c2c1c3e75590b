"""The equality table as a person asks for it: really trained, honest about what is off and what cannot be tried."""

import json
import subprocess
import sys

import pytest

from trilane.cli.app import main
from trilane.config.engines import ENGINES
from trilane.engine.parity import machine, rows
from trilane.launch.local import environment

THREE_ROWS = """
import dataclasses, sys
from trilane.engine import parity
class Strict(parity.Row):
    bound = 0.0  # which nothing satisfies
plan = parity.Task.plan
parity.Task.plan = lambda *args, **options: dataclasses.replace(
    made := plan(*args, **options), run=dataclasses.replace(made.run, train_iters=5, eval_interval=5))
parity.rows = lambda engines: [
    parity.Row(engine="megatron", topology="DP2", settings={"dp": 2}),
    Strict(engine="deepspeed-3d", topology="PP2", settings={"pp": 2, "zero": 1}),
    parity.Row(engine="megatron", topology="TP4 PP4", settings={"tp": 4, "pp": 4}),
]
sys.exit(parity.main(["megatron", "--json"]))
"""


@pytest.mark.slow
def test_rows_are_trained_and_what_exceeds_its_bound_or_the_machine_is_reported() -> None:
    command = [sys.executable, "-c", THREE_ROWS]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    values, lines = json.loads(done.stdout), done.stderr.splitlines()
    assert [set(row) for row in values["rows"]] == [{"engine", "topology", "precision", "max_abs_diff", "seconds"}] * 2
    assert [row["topology"] for row in values["rows"]] == ["DP2", "PP2"]
    assert 0 < values["rows"][1]["max_abs_diff"] < 1e-5
    left_out = "megatron TP4 PP4 fp32: left out, gpus=16: must not exceed the cluster: this machine has 8"
    assert values["left_out"] == [left_out] == lines[2:]
    assert "ok" in lines[0] and "above 0" in lines[1]


def test_every_row_is_a_plan_and_a_card_without_bf16_leaves_those_rows_out(capsys: pytest.CaptureFixture) -> None:
    table = rows()
    assert {row.engine for row in table} == set(ENGINES)
    assert len({row.label for row in table}) == len(table)
    for row in table:
        row.plan(machine(cards=0, bf16=True), "data")
    with pytest.raises(ValueError, match="precision=bf16"):
        next(row for row in table if row.precision == "bf16").plan(machine(cards=8, bf16=False), "data")
    assert main(["measure", "engines", "--engines", "megatron,hf-zero"]) == 2
    assert "did you mean hf-zero3?" in capsys.readouterr().err
