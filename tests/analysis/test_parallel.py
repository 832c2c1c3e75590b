"""Many logs and long ones: several processes and files on disk change nothing in what comes out."""

import csv
import gc
import warnings

import numpy as np
import pytest
from test_log_dialects import m2021, m2022

from trilane.analysis import parallel
from trilane.cli.app import main
from trilane.logs.column import SpilledColumn
from trilane.logs.run import read_logs


@pytest.fixture
def logs(tmp_path):
    for number in range(3):
        text = "".join(m2021(i, 90, ms=1000.0 + i + number, loss=5 - i / 100) for i in range(1, 61))
        (tmp_path / f"{number}.log").write_text(text)
    (tmp_path / "3.log").write_text(m2022(1) + m2022(2))
    return [str(tmp_path / f"{number}.log") for number in range(4)]


def test_other_processes_read_the_same_in_the_same_order(tmp_path, capsys, monkeypatch, logs):
    alone, pooled = tmp_path / "alone.csv", tmp_path / "pooled.csv"
    assert main(["logs", "parse", *logs, str(tmp_path / "none.log"), "--json", "--csv", str(alone)]) == 1
    first = capsys.readouterr()
    monkeypatch.setattr(parallel, "LARGE", 0)
    assert main(["logs", "parse", *logs, str(tmp_path / "none.log"), "--json", "--csv", str(pooled)]) == 1
    second = capsys.readouterr()
    assert first.out == second.out and "none.log: no such file" in first.err and first.err == second.err
    assert alone.read_text() == pooled.read_text()
    assert sorted(path.name for path in tmp_path.glob("*.csv*")) == ["alone.csv", "pooled.csv"], (
        "nothing is left behind"
    )


def test_progress_is_shown_where_there_are_many(tmp_path, capsys, logs):
    assert main(["logs", "parse", *(logs[:1] * parallel.SHOWN)]) == 0
    assert "16/16" in capsys.readouterr().err


def test_csv_holds_every_number_of_every_log(tmp_path, monkeypatch, logs):
    """Columns that go over the disk come back equal, in pieces; what a log does not say is empty."""
    monkeypatch.setattr(parallel, "CHUNK", 7)
    main(["logs", "parse", *logs, "--csv", str(tmp_path / "all.csv")])
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert len(rows) == 3 * 60 + 2
    for name in logs:
        (log,) = read_logs(name)
        mine = [row for row in rows if row["file"] == name]
        for column in log.iterations:
            np.testing.assert_array_equal([float(row[column]) for row in mine], log.iterations[column])
    assert {row["consumed_tokens"] for row in rows[:180]} == {""} and rows[0]["consumed_samples"] == "4"


def test_a_spilled_column_is_an_array_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("trilane.logs.column.TAIL", 5)
    tape, numbers = SpilledColumn(tmp_path), []
    for step in range(40):
        tape.append(step)
        tape.frombytes(np.arange(step, dtype=float).tobytes())
        numbers += [float(step), *map(float, range(step))]
    for place in (3, 700, len(numbers) - 1):
        tape[place] = numbers[place] = -1.0
    assert list(tape.read(0, len(numbers))) == numbers and list(tape.read(600, 700)) == numbers[600:700]
    assert [tape[place] for place in (0, 3, 700, -1, -30)] == [numbers[place] for place in (0, 3, 700, -1, -30)]


def test_a_tape_that_nobody_needs_closes_its_file(tmp_path):
    tape = SpilledColumn(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del tape
        gc.collect()
    assert not [w for w in caught if "unclosed" in str(w.message)]


def test_a_problem_is_printed_with_its_line_and_that_lines_text(tmp_path, capsys):
    (tmp_path / "a.log").write_text("".join(m2021(i, 90, loss=-3.25 if i == 7 else 5 - i / 100) for i in range(1, 30)))
    assert main(["logs", "parse", str(tmp_path / "a.log")]) == 0
    *_, problem, text = capsys.readouterr().out.splitlines()
    assert problem.startswith("  problem: lm_loss: -3.25: ") and problem.endswith("(line 7)")
    assert text.startswith("    iteration 7/ 90 | consumed samples: 28 |")
