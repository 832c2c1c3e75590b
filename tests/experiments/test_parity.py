"""The equality table as a person asks for it: really trained, honest about what is off and what cannot be tried."""

import json

import pytest

from trilane.cli.app import main
from trilane.config.engines import ENGINES
from trilane.experiments import parity
from trilane.experiments.parity import BOUNDS, Row, machine, rows


class Strict(Row):
    """A row that nothing satisfies."""

    bound = property(lambda row: 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_rows_are_trained_and_what_exceeds_its_bound_or_the_machine_is_reported(monkeypatch, capsys):
    table = [
        Row(engine="megatron", topology="DP2", settings={"dp": 2}),
        Strict(engine="deepspeed-3d", topology="PP2", settings={"pp": 2, "zero": 1}),
        Row(engine="megatron", topology="TP4 PP4", settings={"tp": 4, "pp": 4}),
    ]
    monkeypatch.setattr(parity, "rows", lambda engines: table)
    monkeypatch.setattr(parity, "ITERATIONS", 5)  # the first losses are the reference's to the last bit
    assert main(["measure", "engines", "--json"]) == 1
    out, err = capsys.readouterr()
    values = json.loads(out)
    assert [set(row) for row in values["rows"]] == [{"engine", "topology", "precision", "max_abs_diff", "seconds"}] * 2
    assert [row["topology"] for row in values["rows"]] == ["DP2", "PP2"]
    assert 0 < values["rows"][1]["max_abs_diff"] < BOUNDS["fp32"]
    assert values["left_out"] == [
        "megatron TP4 PP4 fp32: left out, gpus=16: must not exceed the cluster: this machine has 8"
    ]
    assert "ok" in err.splitlines()[0] and "above 0" in err.splitlines()[1]


def test_an_unknown_engine_is_refused(capsys):
    assert main(["measure", "engines", "--engines", "megatron,hf-zero"]) == 2
    assert "did you mean hf-zero3?" in capsys.readouterr().err


def test_every_row_is_a_plan_and_no_two_are_called_alike():
    table = rows()
    assert {row.engine for row in table} == set(ENGINES)
    assert len({row.label for row in table}) == len(table)
    assert {row.precision for row in table} == {"fp32", "fp16", "bf16"}
    for row in table:
        row.plan(machine(cards=0, bf16=True), "data")


def test_a_card_without_bf16_leaves_those_rows_out():
    row = next(row for row in rows() if row.precision == "bf16")
    with pytest.raises(ValueError, match="precision=bf16"):
        row.plan(machine(cards=8, bf16=False), "data")
