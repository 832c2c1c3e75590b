"""The command `logs table`: runs of a folder, ours and others', as rows that people and the linter can read."""

import csv
import io
import json
import os

import pandas as pd
import pytest
from support import REPOSITORY, small_plan
from test_collect import DUMP, MEMORY
from test_log_dialects import m2021
from test_run import log_text

from trilane.analysis.fleet import COLUMNS, read_folder, size
from trilane.analysis.tables import markdown, to_html
from trilane.cli.app import main
from trilane.documents.lint.lint import lint
from trilane.workspace.study import Study

RAW = REPOSITORY.parent / "shared/rawlogs"
MORE = "".join(
    f"  {name} {'.' * (48 - len(name))} {value}\n"
    for name, value in (("tensor_model_parallel_size", 4), ("pipeline_model_parallel_size", 2), ("micro_batch_size", 1))
)
NAMES = ", ".join(sorted(name.lower() for name in COLUMNS))
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
    assert lines[0] == ["GPUs", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Loss", "Notes"]
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
    hostile = {**read_folder(folder)[0][0], "name": "a<b\nc|d", "cause": "a<b", "problems": ["<b>|\x1b[2J"]}
    assert '<td class="text">a&lt;b</td>' in to_html([hostile]) and "<b>" not in to_html([hostile])
    assert "| a&lt;b c\\|d" in markdown([hostile]) and "&lt;b&gt;\\|" in markdown([hostile])
    assert "\x1b" not in markdown([hostile]) + to_html([hostile])
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
        (["empty", "--columns", "gpus,los"], f"columns=los: did you mean loss? known: {NAMES}"),
        (["empty", "--sort", "nix"], f"sort=nix: known: {NAMES.replace('status', 'speed, status')}"),
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


def fleet(folder):
    """Four logs: fast and slow, one without TFLOPs, one whose learning rate cannot be right, one of two runs."""
    (folder / "deep").mkdir()
    for name, ms in (("fast.log", 1000.0), ("deep/slow.out", 9000.0)):
        (folder / name).write_text(DUMP + MORE + "".join(m2021(i, ms=ms, loss=ms / 1e3) for i in range(1, 11)))
    (folder / "plain.err").write_text("".join(m2021(i, ms=5000.0, loss=7.5) for i in range(1, 11)) * 2)
    wrong = "".join(m2021(i, loss=9.5).replace("rate: 1.000E-04", "rate: 7.000E+00") for i in range(1, 11))
    (folder / "wrong.log").write_text(DUMP + MORE + wrong)
    return folder


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        (["--sort", "speed"], ["fast.log", "wrong.log", "slow.out", "plain.err", "plain.err run 2"]),
        (["--sort", "speed", "--reverse"], ["slow.out", "wrong.log", "fast.log", "plain.err", "plain.err run 2"]),
        (["--sort", "LOSS"], ["fast.log", "plain.err", "plain.err run 2", "slow.out", "wrong.log"]),
        (["--sort", "problems"], ["wrong.log", "slow.out", "fast.log", "plain.err", "plain.err run 2"]),
        (["--reverse"], ["wrong.log", "plain.err run 2", "plain.err", "fast.log", "slow.out"]),
    ],
)
def test_a_fleet_is_sorted_by_any_column_and_what_has_no_value_is_last(tmp_path, capsys, monkeypatch, sort, names):
    monkeypatch.setattr("trilane.analysis.parallel.MANY", 1)  # all cores
    assert main(["logs", "table", str(fleet(tmp_path)), *sort, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == names


def test_a_row_fits_in_100_columns_and_a_problem_has_a_mark_and_a_line(tmp_path, capsys):
    long = tmp_path / ("a_name_that_is_much_longer_than_a_terminal_is_wide_" * 4 + ".log")
    long.write_text((fleet(tmp_path) / "fast.log").read_text() + OOM)
    main(["logs", "table", str(tmp_path), "--sort", "date"])
    table, problems = capsys.readouterr().out.split("\n\n")
    assert {len(line) for line in table.splitlines()} == {100} and "Date" in table and "OOM" in table
    assert "wrong.log, !" in table and problems.startswith("! wrong.log: learning_rate: 7")
    main(["logs", "table", str(tmp_path), "--columns", "Status, problems,first"])
    assert capsys.readouterr().out.startswith("| Status    | Problems ")


def test_logs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "run.log").write_text(m2021(1) + m2021(2))
    assert [row["name"] for row in read_folder(tmp_path)[0]] == ["a/run.log", "b/run.log"]


def test_no_cell_of_a_csv_file_is_a_formula_and_numbers_stay_numbers(tmp_path, monkeypatch, capsys, outputs):
    """A spreadsheet runs what begins with = + - @, a tab or CR (https://owasp.org/www-community/attacks/CSV_Injection)."""
    names = ["=1+1.log", "+1-2.log", "-1-x.log", "@SUM(1).log", "\ta.log", "\ra.log", "a.log"]
    for name in names:
        (tmp_path / name).write_text(m2021(1, loss=-3.25) + m2021(2, loss=-3.25))
    monkeypatch.chdir(tmp_path)
    main(["logs", "table", ".", "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["Source"][0] for row in rows] == [*("'" * 6), "a"] and {row["Loss"] for row in rows} == {"-3.25"}
    main(["logs", "parse", "--csv", "all.csv", "--", *names])
    with open("all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["file"] for row in rows} == {"a.log", *("'" + name.replace("\r", " ") for name in names[:-1])}
    assert {row["lm_loss"] for row in rows} == {"-3.25"}
    table = pd.DataFrame({"run": ["=A1", "a"], "delta": [-1.5, 2.0]})
    assert Study.create("s").save_table("measured.csv", table).read_text() == "run,delta\n'=A1,-1.5\na,2.0\n"


def test_the_date_is_that_of_the_last_line_where_lines_have_one(tmp_path):
    stamped = "".join(f" [2023-05-06 07:08:{i:02d}.000000]{m2021(i)}" for i in range(1, 11))
    (tmp_path / "copied.log").write_text(stamped)
    assert [row["date"] for row in read_folder(tmp_path)[0]] == ["2023-05-06 07:08"]
