"""A log that no dialect reads is refused with the lines that look like iterations."""

import pytest

from trilane.cli.app import main
from trilane.logs.dialects import tables

UNKNOWN = {
    "numbers without names": "2024-11-01 12:00:0{i} [{n:4d}/ 100] xent {loss} took 1.25 at 3e-4\nloaded 8 of 16 shards\n",
    "short names": "epoch=0 b:{n}/500 nll: {loss} t: 1.{i}s\n",
    "bars": "\rhalf {i}% |###   | done {n} of 500 nll={loss}",
    "control characters": "done \x1b]0;evil\x07\x1b[2J{n} of 500 nll \u202e {loss} {i} " + "y" * 500 + "\n",
}


@pytest.mark.parametrize("line", UNKNOWN.values(), ids=UNKNOWN)
def test_a_refusal_shows_the_lines_that_look_like_iterations_and_names_the_guide(tmp_path, capsys, monkeypatch, line):
    monkeypatch.setenv(tables.VARIABLE, "")
    log = tmp_path / "a.log"
    lines = "".join(line.format(i=i, n=10 * i, loss=10.5 - i) for i in (1, 2, 3))
    log.write_text(f"our trainer begins\n{lines}\n")
    assert main(["logs", "parse", str(log)]) == 2
    refusal, *advice = capsys.readouterr().err.splitlines()
    assert refusal.startswith(f"trilane: log={log}: holds no iteration line")
    assert "9.5" in advice[1] and "my-logs.md" in advice[-1]
    assert all(text.isprintable() and len(text) < 300 for text in advice)


def test_a_log_without_any_such_line_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "a.log").write_text("hello\nworld 3\n" + 1000 * "x\n")
    assert main(["logs", "parse", str(tmp_path / "a.log")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
