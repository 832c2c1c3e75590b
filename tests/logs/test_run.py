"""The log of a run folder: resumed parts as one run, and the status that its launcher wrote."""

import pytest
from test_log_dialects import m2021

from trilane.logs.run import read_run_folder
from trilane.workspace.status import RunStatus, write_status


def lines(first, last, loss=6.0):
    return "".join(m2021(i, loss=loss - i / 10) for i in range(first, last + 1))


def test_the_launchers_verdict_comes_before_the_text(tmp_path):
    (tmp_path / "run.log").write_text(lines(1, 10))
    write_status(
        tmp_path,
        RunStatus(status="crashed", evidence="rank 1: killed", rank=1, exit_code=1, seconds=9.0),
    )
    log = read_run_folder(tmp_path)
    assert (log.status, log.evidence) == ("crashed", "rank 1: killed")


def test_a_run_that_never_took_a_step_is_empty_not_an_error(tmp_path):
    log = read_run_folder(tmp_path)
    assert (len(log.iterations), log.status) == (0, "unfinished")


def test_an_iteration_that_a_resumed_run_trained_again_counts_once(tmp_path):
    """Killed after iteration 7, the run went on from a checkpoint of iteration 4; what was trained
    last stands.
    """
    (tmp_path / "run.log").write_text(lines(1, 7) + "trilane: resumes\n" + lines(5, 10, loss=3.0))
    found = read_run_folder(tmp_path)
    rows = found.iterations
    assert [(at, list(again["iteration"])) for at, again in found.resumes] == [(5, [5, 6, 7])]
    assert list(rows["iteration"]) == list(range(1, 11))
    assert list(rows["lm_loss"]) == pytest.approx(
        [5.9, 5.8, 5.7, 5.6, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0]
    )


def test_a_resumed_run_has_each_evaluation_once(tmp_path):
    """Those after the iteration at which it went on were made again."""
    held_out = (
        " validation loss at iteration {} | lm loss value: {:.6E} | lm loss PPL: 1.0E+00 | \n"
    )
    first = lines(1, 8) + held_out.format(4, 5.5) + held_out.format(8, 5.25)
    again = lines(6, 10) + held_out.format(8, 5.125) + held_out.format(10, 5.0)
    (tmp_path / "run.log").write_text(first + again)
    log = read_run_folder(tmp_path)
    assert log.validation.to_numpy().tolist() == [[4, 5.5], [8, 5.125], [10, 5.0]]
