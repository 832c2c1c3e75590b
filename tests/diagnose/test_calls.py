"""Where the trace of each rank ends is read from its tail alone."""

import json
from pathlib import Path

import pytest

from trilane.cli.app import main
from trilane_diagnose.stacks import last_calls

LOOP = " --- modulename: training, funcname: train\ntraining.py(851):     loss = train_step(\n"
STUCK = " --- modulename: distributed_c10d, funcname: broadcast\ndistributed_c10d.py(1191):         work.wait()\n"


def test_the_last_call_of_each_rank_comes_from_the_tail_the_rarest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces of 45 MB, as in the BLOOM chronicles; other files are ignored."""
    assert (
        main(["debug", "calls", str(tmp_path)]) == 2 and "holds no trace" in capsys.readouterr().err
    )
    (tmp_path / "notes.txt").write_text("nothing\n")
    (tmp_path / "empty.txt").touch()
    for rank in range(8):
        with (tmp_path / f"trace-node0-{rank}-83599{rank}.txt").open("wb") as file:
            file.seek(45_000_000)
            file.write(b"\n" + (LOOP * 3 + (STUCK if rank == 3 else LOOP)).encode())
    assert main(["debug", "calls", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["groups"]
    assert first["ranks"] == ["trace-node0-3-835993"] and len(second["ranks"]) == 7
    assert (first["function"], first["line"]) == (
        "broadcast (distributed_c10d)",
        "distributed_c10d.py:1191  work.wait()",
    )


LOOPS = "data.py(7):     i += 1\n" * 20_000  # that call nothing


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        (LOOPS, "data.py:7  i += 1"),
        ("distributed_c10d.py(11", "distributed_c10d.py:1191  work.wait()"),
    ],
    ids=["a loop", "cut within a line"],
)
def test_a_last_call_is_found_before_what_follows(rest: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "rank_0.txt").write_text(STUCK + rest)
    (place,) = last_calls(tmp_path).groups
    assert place == {"function": "broadcast (distributed_c10d)", "line": line, "ranks": ["0"]}
