"""Where the trace of each rank ends is read from its tail alone."""

import json

from trilane.cli.app import main

LOOP = " --- modulename: training, funcname: train\ntraining.py(851):     loss = train_step(\n"
STUCK = " --- modulename: distributed_c10d, funcname: broadcast\ndistributed_c10d.py(1191):         work.wait()\n"


def test_the_last_call_of_each_rank_comes_from_the_tail_the_rarest_first(tmp_path, capsys):
    """Traces of 45 MB, as in the BLOOM chronicles; other files are ignored."""
    assert (
        main(["debug", "calls", str(tmp_path)]) == 2 and "holds no trace" in capsys.readouterr().err
    )
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
