"""Runs as rows: `logs table` and `logs parse`, a folder or many files, as text, CSV,
HTML and JSON.
"""

import csv
import io
import json
import os

import pytest
from support import small_plan
from test_collect import DUMP, MEMORY, arguments
from test_log_dialects import m2021

from trilane.analysis.collect import frame, markdown, measure_all
from trilane.cli.app import main

MORE = arguments(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, micro_batch_size=1)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"


def outcome(capsys, *arguments):
    """Exit code, standard output and error of a command."""
    return main(list(map(str, arguments))), *capsys.readouterr()


@pytest.fixture
def folder(tmp_path):
    """One run of ours, one log of another trainer, one that ran out of memory, and notes that are
    no log.
    """
    ours = tmp_path / "study/runs/small"
    ours.mkdir(parents=True)
    (ours / "plan.json").write_text(json.dumps(small_plan(dp=2, train_iters=10).to_json()))
    # as a CPU prints
    lines = "".join(m2021(i, ms=200.0 + i, loss=6 - i / 10) for i in range(1, 11))
    rate = " | throughput per GPU (TFLOP/s/GPU): 0.0 | lm loss"
    memory = "(after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: 512.0\n"
    (ours / "run.log").write_text(lines.replace(" | lm loss", rate) + memory)
    (tmp_path / "a.out").write_text(DUMP + MORE + "".join(map(m2021, range(1, 11))) + MEMORY)
    (tmp_path / "b.log").write_text(DUMP + MORE + OOM)
    os.utime(tmp_path / "b.log", (0, 0))
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    return tmp_path


def test_each_run_is_a_row_in_the_words_of_the_chronicles(folder, capsys):
    _, text, errors = outcome(capsys, "logs", "table", folder)
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
    assert " ".join(lines[0]) == "GPUs Size DP TP PP MBS GBS Mem Sec/it TFLOPs Loss Status Notes"
    a, b, ours = lines[2:]
    assert " ".join(a[:9] + a[-2:]) == "8 1.32B 1 4 2 1 4 4.0GiB 2 completed a.out"
    assert b[-2:] == ["OOM", "b.log"]
    assert " ".join(ours[:8] + ours[-1:]) == "2 127K 2 1 1 2 4 0.5GiB study/runs/small"
    assert errors.startswith("trilane: left_out=1: ") and "notes.txt" in errors


def test_text_of_a_log_is_no_markup(folder):
    text = markdown(frame(measure_all([folder])[0]).assign(source="a<b\x1b[2J\nc|d"))
    assert "| a&lt;b c\\|d" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["table", "empty"],
            "logs=empty: holds no run: neither plan.json with run.log, nor a training log",
        ),
        (["parse", "none.log"], "log=none.log: no such file"),
        (["parse", "a.log", "--csv", "a.log"], "csv=a.log: exists; name another file"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.log").write_text(m2021(1))
    assert outcome(capsys, "logs", *arguments)[::2] == (2, f"trilane: {message}\n")


def test_no_cell_of_a_csv_file_is_a_formula_and_numbers_stay_numbers(tmp_path, monkeypatch, capsys):
    """A spreadsheet runs what begins with = + - @, a tab or CR
    (https://owasp.org/www-community/attacks/CSV_Injection).
    """
    names = ["=1+1.log", "+1-2.log", "-1-x.log", "@SUM(1).log", "\ta.log", "\ra.log", "a.log"]
    for name in names:
        (tmp_path / name).write_text(m2021(1, loss=-3.25) + m2021(2, loss=-3.25))
    monkeypatch.chdir(tmp_path)
    rows = list(csv.DictReader(io.StringIO(outcome(capsys, "logs", "table", ".", "--csv")[1])))
    assert [row["source"][0] for row in rows] == [*("'" * 6), "a"] and {
        row["loss"] for row in rows
    } == {"-3.25"}
    outcome(capsys, "logs", "parse", "--csv", "all.csv", "--", *names)
    with open("all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(names) and {row["lm_loss"] for row in rows} == {"-3.25"}
    assert all(row["file"][0] in "'a" for row in rows)
