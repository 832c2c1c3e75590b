"""A fingerprint lies beside what was saved."""

import json
from pathlib import Path

import pytest
from plans import changed, small_plan


@pytest.mark.slow
def test_every_rank_writes_its_fingerprint_when_it_saves_and_when_it_has_loaded(
    train, fork, data: Path, tmp_path: Path
) -> None:
    """A second load gets a folder of its own; the checkpoint's manifest covers the first."""
    from trilane.workspace.checkpoints import read_manifest

    plan = changed(small_plan(data, iters=2, source="mock", dp=2), "run", save_interval=1, keep_last=0)
    train(plan)
    folder = tmp_path / "run"
    assert {f"fingerprint_0000{rank}.json" for rank in (0, 1)} <= read_manifest(folder / "checkpoints/iter_0000001")[
        "files"
    ].keys()
    for _ in range(2):
        fork(2, folder)
    loads = sorted((folder / "fingerprints").iterdir())
    assert [path.name for path in loads] == ["load_0000002.1", "load_0000002.2"]
    loaded = json.loads((loads[0] / "fingerprint_00001.json").read_text())
    assert (loaded["dp"], loaded["iteration"], loaded["scalars"]["step"]) == (1, 2, 2.0)
