"""The files of a run folder after a crash: what is whole counts, nothing is lost."""

import json

import pytest
from support import small_plan

from trilane.workspace.run import Run, cut_steps, iteration, put_aside
from trilane.workspace.status import RunStatus, Status, write_status


def line(number: int) -> bytes:
    return json.dumps({"iteration": number, "lm_loss": 3.0}).encode() + b"\n"


WHOLE = b"".join(map(line, range(1, 6)))
TAILS = {
    "half a character": b'{"iteration": 6, "host": "\xc3',
    "many NULs": b"\0" * 100_000,
    "a number too large": b'{"iteration": 1e999}\n{"iteration": ' + b"9" * 6000 + b"}\n",
    "another type": b'[]\nnull\n"x"\n{}\n{"iteration": "7"}\n{"iteration": true}\n',
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
def test_the_last_whole_line_counts_and_what_is_cut_is_kept(tail: bytes, tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(WHOLE + tail)
    assert iteration(tmp_path) == 5
    cut_steps(tmp_path, 3)
    assert path.read_bytes() == b"".join(map(line, (1, 2, 3)))
    assert (tmp_path / "earlier/steps.jsonl.1").read_bytes() == WHOLE + tail


def test_an_attempt_that_goes_on_keeps_its_files_and_one_that_begins_again_moves_them(
    tmp_path,
):
    """Under the next number, also where an earlier one was deleted; a folder in the place of a file
    moves as well.
    """
    (tmp_path / "attempts/7").mkdir(parents=True)
    (tmp_path / "attempts/notes.txt").touch()
    (tmp_path / "status.json").mkdir()
    for name in ("run.log", "steps.jsonl"):
        (tmp_path / name).write_text(name)
    put_aside(tmp_path, keep=True)
    assert {p.name for p in tmp_path.iterdir()} == {"run.log", "steps.jsonl", "attempts"}
    put_aside(tmp_path, keep=False)
    assert [p.name for p in tmp_path.iterdir()] == ["attempts"]
    assert (tmp_path / "attempts/8/status.json").is_dir()
    assert {p.name for p in (tmp_path / "attempts/9").iterdir()} == {"run.log", "steps.jsonl"}


def test_a_completed_run_whose_plan_is_extended_has_more_to_do(tmp_path):
    (tmp_path / "steps.jsonl").write_bytes(b"".join(map(line, range(1, 5))))
    write_status(
        tmp_path,
        RunStatus(status=Status.COMPLETED, evidence="", rank=None, exit_code=0, seconds=1.0),
    )
    for iterations, completed in ((4, True), (9, False)):
        (tmp_path / "plan.json").write_text(
            json.dumps(small_plan(train_iters=iterations).to_json())
        )
        assert Run(tmp_path).is_completed is completed
    (tmp_path / "plan.json").unlink()
    assert Run(tmp_path).is_completed
