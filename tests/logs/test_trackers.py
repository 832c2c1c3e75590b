"""Event files of TensorBoard, written by its own library and read back."""

from pathlib import Path

import pytest

from trilane.cli.app import main
from trilane.logs.run import read_log

pytest.importorskip("tensorboard")

LINE = (
    " iteration {0:8d}/ 100 | consumed samples: 8 | elapsed time per iteration (ms): {1} |"
    " learning rate: 1.0E-04 | global batch size: 8 | lm loss: {2:.6E} | grad norm: 1.5 |\n"
)


def test_iterations_come_back_from_tensorboard(tmp_path: Path, capsys):
    log = tmp_path / "run.log"
    log.write_text("".join(LINE.format(i, 500 + i, 5 - i / 100) for i in range(1, 31)))
    folder = tmp_path / "events"
    assert main(f"logs parse {log} --tensorboard {folder}".split()) == 0
    (events,) = folder.rglob("*tfevents*")
    names = ["iteration", "sec_per_it", "lm_loss", "learning_rate", "grad_norm"]
    given, back = (read_log(path).iterations[names].to_numpy() for path in (log, events))
    assert back == pytest.approx(given, rel=1e-6)  # of fp32
    assert main(f"logs parse {log} --tensorboard {folder}".split()) == 2


def test_a_file_that_is_none_is_one_line(tmp_path: Path, capsys):
    path = tmp_path / "events.out.tfevents.1"
    for content in (b"", b"\1\2\3" * 99):
        path.write_bytes(content)
        assert main(["logs", "parse", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["logs", "parse", f"{path}2"]) == 2
