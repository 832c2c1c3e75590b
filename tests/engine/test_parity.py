"""The equality table as a person asks for it: honest about what is off and what cannot be tried."""

import json
import math
import os
from pathlib import Path
from unittest import mock

import pytest

from trilane.cli.app import main
from trilane.config.engines import ENGINES
from trilane.config.plan import Plan
from trilane_engine import parity
from trilane_engine.parity import machine, rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

LOSSES = {
    "one process": 2.0,
    "DP2": 2 + 9e-6,
    "PP2": 2 + 11e-6,
    "TP2": 2 + 19e-4,
    "TP2 DP2": math.nan,
    "DP4": 2.0,
}


def test_rows_are_trained_and_what_exceeds_its_bound_or_the_machine_is_reported(
    monkeypatch, capsys
) -> None:
    """With losses in the place of trainings, which test_equality has: 1e-5 is the bound of fp32,
    2e-3 of 16 bits.
    """
    settings = {
        "DP2": {"dp": 2},
        "PP2": {"pp": 2},
        "TP2": {"tp": 2},
        "TP2 DP2": {"tp": 2, "dp": 2},
        "DP4": {"dp": 4},
    }
    kinds = {"TP2": "bf16", "TP2 DP2": "fp16"}
    more = {**settings, "TP4 PP4": {"tp": 4, "pp": 4}}.items()
    table = [
        parity.Row(engine="megatron", topology=n, precision=kinds.get(n, "fp32"), settings=s)
        for n, s in more
    ]
    names = iter(["one process", *settings])

    def run(plan: Plan, processes: int, folder: Path) -> tuple[str, float]:
        name = next(names)
        assert processes == (0 if name == "one process" else plan.topology.gpus)
        folder.mkdir(parents=True)
        (folder / "steps.jsonl").write_text('{"lm_loss": 3.0}\n')
        (folder / "validation.jsonl").write_text(json.dumps({"lm_loss": LOSSES[name]}) + "\n")
        return "a last line" * (name == "DP4"), 1.234

    monkeypatch.setattr(parity, "_run", run)
    monkeypatch.setattr(parity, "load", lambda: None)
    monkeypatch.setattr(parity, "rows", lambda engines: table if engines == ["megatron"] else [])
    with mock.patch.dict(os.environ):
        assert parity.main(["megatron", "--json"]) == 1 and parity.main(["hf-zero3"]) == 1
    out, err = capsys.readouterr()
    values, rest = json.JSONDecoder().raw_decode(out)
    diffs = [pytest.approx(x, rel=1e-4) for x in (9e-6, 11e-6, 19e-4)]
    assert [row["max_abs_diff"] for row in values["rows"]] == [*diffs, math.inf, None]
    row = {
        "engine": "megatron",
        "topology": "DP4",
        "precision": "fp32",
        "max_abs_diff": None,
        "seconds": 1.23,
    }
    left_out = (
        "megatron TP4 PP4 fp32: left out, gpus=16: must not exceed the cluster: this machine has 8"
    )
    assert (values["rows"][4], values["left_out"], err.splitlines()[5:]) == (
        row,
        [left_out],
        [left_out],
    )
    ends = [line.partition("1.2 s  ")[2] for line in err.splitlines()[:5]]
    assert (
        ends == ["ok", "above 1e-05", "ok", "above 0.002", "failed"]
        and "a last line" in err.splitlines()[4]
    )
    assert out[rest - len(out) :].strip() == "0 of 0 rows within their bound; 0 left out"


def test_every_row_is_a_plan_and_a_card_without_bf16_leaves_those_rows_out(
    capsys: pytest.CaptureFixture,
) -> None:
    table = rows()
    assert {row.engine for row in table} == set(ENGINES)
    assert len({row.label for row in table}) == len(table)
    for row in table:
        row.plan(machine(cards=0, bf16=True), "data")
    with pytest.raises(ValueError, match="precision=bf16"):
        next(row for row in table if row.precision == "bf16").plan(
            machine(cards=8, bf16=False), "data"
        )
    kinds = [
        (m.gpu.kind, m.gpus_per_node, m.gpu.bf16_flops_per_s > 0)
        for m in (machine(0, True), machine(4, False))
    ]
    assert kinds == [("cpu", 8, True), ("cuda", 4, False)]
    assert main(["measure", "engines", "--engines", "megatron,hf-zero"]) == 2
    assert "did you mean hf-zero3?" in capsys.readouterr().err
