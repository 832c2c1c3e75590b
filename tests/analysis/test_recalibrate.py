"""The loop: what measured rows teach, and how far predictions may then be trusted."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import small_plan
from test_calibration import A100
from test_collect import DUMP
from test_log_dialects import m2021
from test_measure import log

from trilane.analysis import collect, recalibrate
from trilane.analysis.measure import measure_log
from trilane.cli.app import main
from trilane.costmodel.backtest import backtest, predict_row
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.constants import BOUNDS
from trilane.costmodel.fit import posterior, refit
from trilane.costmodel.measured_rows import read_rows, shipped_rows
from trilane.costmodel.predict import predict
from trilane.costmodel.recalibration import fit, predictions
from trilane.costmodel.shipped import calibration_for, default, prior_of
from trilane.workspace.study import Study

# Tables of at least eight rows, and the rows of the same campaign (card and software) outside them.
TABLES = ("s003-t4", "s003-t27", "s003-t29", "s004-t1")


def eight_of_a_table(table):
    """Eight rows of a table, the campaign's other rows, and constants that have seen
    none of them.
    """
    rows = [
        r
        for r in read_rows(shipped_rows().with_name("scored.csv"))[0]
        if r.seconds > 0 and not r.excluded and not r.duplicate_of
    ]
    on = [r for r in rows if r.table == table][:8]
    first, ids = on[0], {r.row_id for r in on}
    mine = [
        r
        for r in rows
        if (r.case.cluster.gpu.name[:4], r.stack) == (first.case.cluster.gpu.name[:4], first.stack)
    ]
    blank = dataclasses.replace(
        Calibration(), regimes=prior_of(first.case.cluster.name, "").regimes
    )
    return on, [r for r in mine if r.row_id not in ids], blank


@pytest.mark.slow
def test_eight_rows_of_a_table_lower_the_error_on_the_campaigns_others_and_the_intervals_hold():
    inside = []
    for table in TABLES:
        on, others, blank = eight_of_a_table(table)
        fitted = refit([r.case for r in on], [r.seconds for r in on], blank).calibration
        belief = posterior([r.case for r in on], [r.seconds for r in on], fitted, blank)
        widths = belief.half_widths([r.case for r in others])
        before, after = (
            np.array([abs(math.log(predict_row(r, c).sec_pred / r.seconds)) for r in others])
            for c in (blank, fitted)
        )
        assert np.median(after) < 0.7 * np.median(before), table
        inside += (after < widths).tolist()
    assert 0.85 <= np.mean(inside) <= 0.95, "90 % intervals"


def test_a_lesson_brings_predictions_nearer_and_reports_their_uncertainty(outputs):
    plans = [small_plan("a"), small_plan("b", dp=2), small_plan("c", tp=2)]
    blank = [recalibrate.case_of(measure_log(log(), p)) for p in plans]
    true = [1.5 * p.sec_per_it for p in predictions(blank, default(blank[0].cluster))]
    runs = [measure_log(log(sec_per_it=s), p) for s, p in zip(true, plans, strict=True)]
    recalibration = recalibrate.recalibrate(runs)
    table = recalibration.to_frame()
    before, after = table["predicted_over_measured"] - 1, table["recalibrated_over_measured"] - 1
    assert after.abs().max() < before.abs().min()
    for p, row in zip(recalibration.after, recalibration.rows, strict=True):
        assert p.sec_lo < row.seconds < p.sec_hi
    assert "3 of 3 runs completed" in collect.MeasuredRuns(runs=tuple(runs)).summary(recalibration)
    assert not recalibrate.recalibrate([measure_log(log())])


def test_a_folder_of_anybodys_logs_is_gathered(tmp_path, outputs):
    folder = tmp_path / "logs"
    (folder / "run").mkdir(parents=True)
    (folder / "run/plan.json").write_text(json.dumps(small_plan().to_json()))
    (folder / "run/run.log").write_text("".join(map(m2021, range(1, 11))))
    (folder / "run/rank0.log").write_text("".join(map(m2021, range(1, 11))))
    (folder / "a.out").write_text(DUMP + "".join(map(m2021, range(1, 11))) + m2021(1))
    (folder / "notes").write_text("no training here\n")
    found = collect.measure_runs(Study.open("s"), str(folder), 5)
    assert [m.name for m in found.runs] == ["run", "2 a.out", "3 a.out"]
    assert "tflops" in found._repr_html_()
    (unread,) = found.unread
    assert unread.startswith(f"log={folder}/notes: holds no iteration line")
    card = collect.measure_runs(Study.open("s"), f"{folder}/a.out", 5, A100).runs[0]
    assert card.config.card == "A100-80GB" and card.utilization["mfu"] > 0
    with pytest.raises(ValueError, match="study=s: has no run"):
        collect.measure_runs(Study.open("s"))
    with pytest.raises(ValueError, match=r"logs=.*: no log among them: no such file"):
        collect.measure_runs(Study.open("s"), f"{tmp_path}/none")


NAMES = "cluster gpu layers hidden heads seq vocab_size dp tp pp mbs gbs engine ffn activation"


def ten_rows() -> pd.DataFrame:
    """Ten runs as typed by a user: a Llama-like 7B by Megatron-DeepSpeed in 2024, on a machine
    slower by a quarter.
    """
    rows = pd.read_csv(shipped_rows().with_name("lucie_jz_a100_2024.csv")).query(
        "gbs % (mbs * dp) == 0 and gpus <= 64"
    )
    rows["sec_per_it"] *= 1.25
    return rows[["row_id", *NAMES.split(), "sec_per_it"]][:10]


def calibrated(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code and what `trilane calibrate` printed."""
    code = main(["calibrate", *map(str, words)])
    return code, *capsys.readouterr()


def test_ten_rows_calibrate_alike_from_csv_markdown_python_and_04(
    tmp_path, outputs, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = ten_rows()
    rows.to_csv("rows.csv", index=False)
    lines = [list(rows), ["---"] * len(rows.columns), *rows.astype(str).to_numpy().tolist()]
    Path("rows.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    code, out, err = calibrated(capsys, "rows.csv", "--cluster", "jz-a100-80g", "-o", "own.json")
    assert (code, err) == (0, "") and "10 rows of megatron-deepspeed-2024" in out
    own = calibration_for(A100, "own.json")
    assert (own.rows, own.card, own.cluster) == (10, "A100-80GB", "jz-a100-80g") and own.hash in out
    calibrated(capsys, "rows.md", "--cluster", "jz-a100-80g", "-o", "typed.json")
    in_memory = fit(rows, "jz-a100-80g")
    assert own.hash == calibration_for(A100, "typed.json").hash == in_memory.fitted.hash
    assert predict(in_memory.cases[0], in_memory.fitted) == predict(in_memory.cases[0], own)
    study = Study.create("ours")
    runs = collect.measure_runs(study, "rows.csv", 5, A100)
    recalibration = recalibrate.recalibrate(runs.runs, A100)
    recalibration.save(study, "04_analyze")
    assert "10 of 10 runs completed" in runs.summary(recalibration) and not runs.timed
    calibrated(capsys, "ours", "--cluster", "jz-a100-80g", "-o", "again.json")
    assert (
        calibration_for(A100, "ours").hash == calibration_for(A100, "again.json").hash == own.hash
    )
    code, _, err = calibrated(capsys, "rows.csv", "--cluster", "jz-a100-80g", "-o", "own.json")
    assert (code, err) == (2, "trilane: output=own.json: exists; name another file\n")


def times(factor, at=slice(None)):
    """The rows with some of their seconds multiplied."""

    def change(rows):
        rows.loc[rows.index[at], "sec_per_it"] *= factor
        return rows

    return change


BAD_ROWS = {
    "rows without a shape": (
        lambda r: r.drop(columns=["heads", "layers"]),
        "has no column layers, heads; needed: ",
    ),
    "empty cells": (
        lambda r: r.assign(hidden=None, vocab_size=None),
        "lu-0004: hidden, vocab_size='': is missing",
    ),
    "another cluster": (
        lambda r: r.assign(cluster="dgx-a100-80g"),
        "lu-0004: ran on dgx-a100-80g",
    ),
    "another card": (
        lambda r: r.assign(gpu="H100-80GB"),
        "gpu=H100-80GB: jz-a100-80g has A100-80GB",
    ),
    "milliseconds called seconds": (times(1000), "seconds of an iteration are needed"),
    "no seconds": (lambda r: r.drop(columns="sec_per_it"), "lu-0004: has no seconds"),
    "negative seconds": (times(-1), "lu-0004: sec_per_it="),
    "ten equal rows": (
        lambda r: pd.concat([r[:1]] * 10),
        "rows=10: 1 different configurations among them can be used, 2 are needed",
    ),
    "a factor of ten": (times(10, slice(3, 4)), "they contradict each other"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_calibrate_are_refused_in_one_line(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, message = BAD_ROWS[name]
    change(ten_rows()).to_csv("rows.csv", index=False)
    code, out, err = calibrated(capsys, "rows.csv", "--cluster", "jz-a100-80g", "-o", "own.json")
    assert (
        (code, out, err.count("\n")) == (2, "", 1)
        and message in err
        and not Path("own.json").exists()
    )


def test_rows_that_teach_nothing_leave_the_constants_as_they_are(tmp_path, capsys, monkeypatch):
    """Seconds that are predicted anyway, but for the noise of runs."""
    monkeypatch.chdir(tmp_path)
    rows = ten_rows()
    usual = [p.sec_pred for p in backtest(rows, "jz-a100-80g").predictions]
    rows["sec_per_it"] = usual * np.exp(np.random.default_rng(0).normal(0, 0.02, len(rows)))
    rows.to_csv("rows.csv", index=False)
    code, out, _ = calibrated(capsys, "rows.csv", "--cluster", "jz-a100-80g", "-o", "own.json")
    assert code == 0 and "the constants stay" in out and "moved" not in out
    prior, own = (calibration_for(A100, name) for name in ("megatron-deepspeed-2024", "own.json"))
    assert (
        all(getattr(own, name) == getattr(prior, name) for name in BOUNDS)
        and own.card == "A100-80GB"
    )
