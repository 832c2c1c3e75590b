"""A log that no dialect reads is refused with the lines that look like iterations and a table that reads them."""

import json

import pytest

from trilane.cli.app import main
from trilane.logs.dialects import tables
from trilane.logs.run import read_log

UNKNOWN = {
    "numbers without names": (
        "2024-11-01 12:00:0{i} [{n:4d}/ 100] xent {loss} took 1.25 at 3e-4\nloaded 8 of 16 shards\n",
        {"iteration": 30, "lm_loss": 7.5},
    ),
    "short names": ("epoch=0 b:{n}/500 nll: {loss} t: 1.{i}s\n", {"iteration": 30, "lm_loss": 7.5}),
    "bars": ("\rhalf {i}% |###   | done {n} of 500 nll={loss}", {"iteration": 30, "lm_loss": 7.5}),
}


@pytest.fixture(autouse=True)
def _no_own_tables(monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, "")


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_drafted_table_reads_a_log_that_nothing_reads(tmp_path, capsys, name):
    line, expected = UNKNOWN[name]
    log = tmp_path / "a.log"
    log.write_text(
        "our trainer begins\n" + "".join(line.format(i=i, n=10 * i, loss=10.5 - i) for i in (1, 2, 3)) + "\n"
    )
    assert main(["logs", "parse", str(log)]) == 2
    refusal, *advice = capsys.readouterr().err.splitlines()
    assert (
        refusal.startswith(f"trilane: log={log}: holds no iteration line") and "look most like iterations" in advice[0]
    )
    (draft,) = [text for text in advice if text.strip().startswith("{")]
    (tmp_path / "mine.json").write_text(draft)
    assert main(["logs", "parse", str(log), "--dialect", str(tmp_path / "mine.json")]) == 0
    assert read_log(log).iterations.iloc[-1][list(expected)].to_dict() == expected


def test_a_log_without_any_such_line_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "a.log").write_text("hello\nworld 3\n" + 1000 * "x\n")
    assert main(["logs", "parse", str(tmp_path / "a.log")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_lines_of_a_log_are_shown_without_their_control_characters(tmp_path, capsys):
    lines = "".join(f"done \x1b]0;evil\x07\x1b[2J{n} of 500 nll \u202e 3.5 {'y' * 500}\n" for n in range(20))
    (tmp_path / "a.log").write_text(lines + "z" * 3_000_000 + "\n" + json.dumps({"b": 7}))
    assert main(["logs", "parse", str(tmp_path / "a.log")]) == 2
    error = capsys.readouterr().err
    assert (
        "look most like" in error and error.replace("\n", "").isprintable() and max(map(len, error.splitlines())) < 2000
    )
