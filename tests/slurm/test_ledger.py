"""The ledger of a run folder, also where a process or the node died while it wrote."""

import json
from pathlib import Path

import pytest

from trilane.slurm import ledger

GOOD = {"event": "started", "id": "7", "time": "2026-11-22T00:00:00+00:00", "nodes": "n1", "iteration": 3}


@pytest.mark.parametrize(
    "damage",
    [
        b'{"event": "submitted", "id": "8", "ti',
        b'{"event": "submitted", "id": "\xc3',
        b"\0\0\0\0",
        b'{"event": "submitted"}',
        b'{"event": ["started"], "id": "8"}',
        b'{"event": "started", "id": "8", "nodes": "n1"}',
        b'{"event": "ended", "id": 8, "status": "OOM", "evidence": "x"}',
        b'{"event": "node failure", "id": "8", "nodes": [{"n1": 1}]}',
        b'{"event": "nodes", "id": "8", "chosen": [["n1"]], "left_out": {}}',
        b'{"event": "submitted", "id": "8", "token": ["x"]}',
        b"[1, 2]",
        b"null",
    ],
)
def test_a_damaged_line_costs_itself_and_nothing_after_it(damage: bytes, tmp_path: Path) -> None:
    ledger.note(tmp_path, "submitted", "7", site="test", script="")
    with (tmp_path / ledger.NAME).open("ab") as file:
        file.write(json.dumps(GOOD).encode() + b"\n" + damage)
    ledger.note(tmp_path, "ended", "7", status="OOM", evidence="é")
    assert [(e["event"], e["id"]) for e in ledger.events(tmp_path)] == [
        ("submitted", "7"),
        ("started", "7"),
        ("ended", "7"),
    ]
    assert ledger.job_ids(tmp_path) == ["7"] and ledger.events(tmp_path, "started") == [GOOD]
