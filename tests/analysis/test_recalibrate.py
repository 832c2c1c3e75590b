"""The loop: what measured rows teach, and how far predictions may then be trusted."""

import json
from pathlib import Path

import pandas as pd
import pytest
from support import small_plan
from test_calibration import A100
from test_collect import DUMP
from test_log_dialects import m2021
from test_measure import log

from trilane.analysis import collect, recalibrate
from trilane.analysis.measure import measure_log
from trilane.analysis.recalibrate import fit
from trilane.cli.app import main
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import calibration_for, default
from trilane.utils.validation import DATA
from trilane.workspace.study import Study


def test_a_lesson_brings_predictions_nearer_and_reports_their_uncertainty(outputs):
    plans = [small_plan("a"), small_plan("b", dp=2), small_plan("c", tp=2)]
    blank = [recalibrate.case_of(measure_log(log(), p)) for p in plans]
    true = [1.5 * predict(c, default(c.cluster)).sec_per_it for c in blank]
    runs = [measure_log(log(sec_per_it=s), p) for s, p in zip(true, plans, strict=True)]
    recalibration = recalibrate.recalibrate(runs)
    table = recalibration.to_frame()
    before, after = table["predicted_over_measured"] - 1, table["recalibrated_over_measured"] - 1
    assert after.abs().max() < before.abs().min()
    width = 1 + table["recalibrated_half_width"]
    assert (table["recalibrated_over_measured"].between(1 / width, width)).all()
    assert recalibration.headline.startswith("Predicted seconds were wrong by 33% at the median; ")
    assert not recalibrate.recalibrate([measure_log(log())])


def test_a_folder_of_anybodys_logs_is_gathered(tmp_path, outputs):
    folder = tmp_path / "logs"
    (folder / "run").mkdir(parents=True)
    (folder / "run/plan.json").write_text(json.dumps(small_plan().to_json()))
    (folder / "run/run.log").write_text("".join(map(m2021, range(1, 11))))
    (folder / "run/rank0.log").write_text("".join(map(m2021, range(1, 11))))
    (folder / "a.out").write_text(DUMP + "".join(map(m2021, range(1, 11))) + m2021(1))
    (folder / "notes").write_text("no training here\n")
    found = collect.measure_runs(Study.open("s"), str(folder))
    assert [m.name for m in found.runs] == ["1 run", "2 a.out", "3 a.out"]
    assert "tflops" in found._repr_html_()
    (unread,) = found.unread
    assert unread.startswith(f"log={folder}/notes: holds no iteration line")
    card = collect.measure_runs(Study.open("s"), f"{folder}/a.out", A100).runs[0]
    assert card.mfu > 0
    with pytest.raises(ValueError, match="study=s: has no run"):
        collect.measure_runs(Study.open("s"))
    with pytest.raises(ValueError, match=r"logs=.*: no log among them: no such file"):
        collect.measure_runs(Study.open("s"), f"{tmp_path}/none")


AT = ("--cluster", "jz-a100-80g", "-o")
NAMES = "cluster gpu layers hidden heads seq vocab_size dp tp pp mbs gbs engine ffn activation"


def ten_rows() -> pd.DataFrame:
    """Ten runs as typed by a user: a Llama-like 7B by Megatron-DeepSpeed in 2024, on a machine
    slower by a quarter.
    """
    rows = pd.read_csv(DATA / "lucie_jz_a100_2024.csv").query(
        "gbs % (mbs * dp) == 0 and gpus <= 64"
    )
    rows["sec_per_it"] *= 1.25
    return rows[["row_id", *NAMES.split(), "sec_per_it"]][:10]


def calibrated(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code and what `trilane calibrate` printed."""
    code = main(["calibrate", *map(str, words)])
    return code, *capsys.readouterr()


def test_ten_rows_calibrate_alike_from_csv_markdown_and_python(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ten_rows()
    rows.to_csv("rows.csv", index=False)
    lines = [list(rows), ["---"] * len(rows.columns), *rows.astype(str).to_numpy().tolist()]
    Path("rows.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    own = {}
    for source in ("rows.csv", "rows.md"):
        code, out, err = calibrated(capsys, source, *AT, f"{source}.json")
        assert (code, err) == (0, "") and "10 rows of megatron-deepspeed-2024" in out
        own[source] = calibration_for(A100, f"{source}.json")
    known = own["rows.csv"]
    assert (known.rows, known.card) == (10, "A100-80GB")
    in_memory = fit(rows, "jz-a100-80g")
    assert known.hash == own["rows.md"].hash == in_memory.fitted.hash
    assert predict(in_memory.cases[0], in_memory.fitted) == predict(in_memory.cases[0], known)
    code, _, err = calibrated(capsys, "rows.csv", *AT, "rows.csv.json")
    assert (code, err) == (2, "trilane: output=rows.csv.json: exists; name another file\n")


def times(factor, at=slice(None)):
    """The rows with some of their seconds multiplied."""

    def change(rows):
        rows.loc[rows.index[at], "sec_per_it"] *= factor
        return rows

    return change


BAD_ROWS = {
    "rows without a shape": (
        lambda r: r.drop(columns=["heads", "layers"]),
        "lu-0004: num_layers, num_attention_heads='': is missing",
    ),
    "empty cells": (
        lambda r: r.assign(hidden=None, vocab_size=None),
        "lu-0004: hidden_size, vocab_size='': is missing",
    ),
    "another cluster": (
        lambda r: r.assign(cluster="dgx-a100-80g"),
        "lu-0004: ran on dgx-a100-80g",
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
    code, out, err = calibrated(capsys, "rows.csv", *AT, "own.json")
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert not Path("own.json").exists()
