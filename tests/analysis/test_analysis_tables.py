"""The command `logs table`: runs of a folder, ours and others', as rows that people and the linter can read."""

import csv
import io
import json
import os

import pytest
from support import REPOSITORY, small_plan
from test_collect import DUMP, MEMORY
from test_log_dialects import m2021
from test_run import log_text

from trilane.analysis.tables import markdown, read_folder, size, to_html
from trilane.cli.app import main
from trilane.documents.lint.lint import lint

RAW = REPOSITORY.parent / "shared/rawlogs"
MORE = "".join(
    f"  {name} {'.' * (48 - len(name))} {value}\n"
    for name, value in (("tensor_model_parallel_size", 4), ("pipeline_model_parallel_size", 2), ("micro_batch_size", 1))
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"


@pytest.fixture
def folder(tmp_path):
    """One run of ours, one log of another trainer, one that ran out of memory, and notes that are no log."""
    ours = tmp_path / "study/runs/small"
    ours.mkdir(parents=True)
    (ours / "plan.json").write_text(json.dumps(small_plan(dp=2, train_iters=10).to_json()))
    (ours / "run.log").write_text(log_text().replace("(TFLOP/s/GPU): 1.5", "(TFLOP/s/GPU): 0.0"))  # as a CPU prints
    (tmp_path / "a.out").write_text(DUMP + MORE + "".join(map(m2021, range(1, 11))) + MEMORY)
    (tmp_path / "b.log").write_text(DUMP + MORE + OOM)
    os.utime(tmp_path / "b.log", (0, 0))
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    return tmp_path


def test_each_run_is_a_row_in_the_words_of_the_chronicles(folder, capsys):
    assert main(["logs", "table", str(folder)]) == 0
    output = capsys.readouterr()
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in output.out.splitlines()]
    assert lines[0] == ["GPUs", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes"]
    a, b, ours = lines[2:]
    assert a[:9] == ["8", "1.3B", "1", "4", "2", "1", "4", "2.0GiB", "2"] and a[-1] == "a.out"
    assert (b[7], b[8], b[-1]) == ("OOM", "", "b.log, OOM")
    assert ours[:8] == ["2", "127K", "2", "1", "1", "2", "4", "0.5GiB"] and ours[-1] == "small"
    assert output.err.startswith("trilane: left out: log=") and "notes.txt" in output.err


def test_the_table_is_one_that_the_linter_reads_without_a_finding(folder, capsys):
    main(["logs", "table", str(folder)])
    (folder / "out.md").write_text(capsys.readouterr().out)
    report = lint(folder / "out.md")
    assert (report.rows, report.findings) == (3, [])


def test_csv_html_and_json_hold_the_same(folder, capsys):
    main(["logs", "table", str(folder), "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["Notes"] for row in rows] == ["a.out", "b.log, OOM", "small"]
    main(["logs", "table", str(folder), "--html"])
    assert capsys.readouterr().out.count("<tr>") == 4
    assert "<td>a&lt;b" in to_html([{**read_folder(folder)[0][0], "notes": "a<b"}])
    assert "| a&lt;b c\\|d" in markdown([{**read_folder(folder)[0][0], "notes": "a<b\nc|d"}])
    main(["logs", "table", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    first, second, ours = report["rows"]
    assert (first["sec_per_it"], first["gpus"], second["sec_per_it"], second["status"]) == (2.0, 8, None, "OOM")
    assert ours["tflops"] == pytest.approx(small_plan().shape.flops_per_iteration(4) / 0.208 / 2 / 1e12, rel=0.01)
    assert len(report["left_out"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "folder=missing: no such folder"),
        (["empty"], "folder=empty: holds no run: neither plan.json with run.log, nor a training log"),
        (["empty", "--csv", "--html"], "table=empty: choose one of --markdown, --csv, --html, --json"),
    ],
)
def test_a_folder_without_runs_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    try:
        code = main(["logs", "table", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert (code, capsys.readouterr().err) == (2, f"trilane: {message}\n")


@pytest.mark.parametrize(
    ("parameters", "text"), [(181.2e9, "181B"), (1.3e9, "1.3B"), (9.97e9, "10B"), (350e6, "350M"), (999.6e6, "1.0B")]
)
def test_sizes_are_printed_in_the_units_of_the_field(parameters, text):
    assert size(parameters) == text


@pytest.mark.skipif(not RAW.is_dir(), reason="the folder of real logs is not beside this checkout")
def test_real_logs_make_the_rows_that_were_typed_from_them():
    """Behind lines 59 (1.381 s), 61 (2.738 s) and 166 (127 s) of document 001 stand such logs."""
    rows, left_out = read_folder(RAW)

    def row_of(word):
        row = next(row for row in rows if word in row["source"])
        return tuple(row[name] for name in ("gpus", "tp", "pp", "dp", "mbs", "gbs", "sec_per_it"))

    assert row_of("n16-ds-on") == (64, 4, 16, 1, 4, 1024, pytest.approx(137, abs=0.5))
    assert row_of("base_n16_dp1") == (64, 4, 16, 1, 1, 4, pytest.approx(2.738, rel=1e-3))
    assert row_of("base_n4_dp1") == (16, 4, 4, 1, 1, 4, pytest.approx(1.381, abs=0.001))
    assert len(rows) == 9 and sum("bench" in line for line in left_out) == 2
    zero = next(row for row in rows if "zero" in row["source"])
    names = ("gpus", "tp", "dp", "mbs", "gbs")
    assert [*(zero[name] for name in names), round(zero["sec_per_it"])] == [64, 4, 16, 48, 768, 125]
    assert size(zero["parameters"]) == "52B", "not 48B, as 2^30 would make it"
