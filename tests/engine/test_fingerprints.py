"""A fingerprint lies beside what was saved."""

from types import SimpleNamespace

import numpy as np
import pytest
from plans import changed, small_plan
from support import Later

from trilane.config.batch_rampup import Batch

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported
torch, fingerprints = Later("torch"), Later("trilane_engine.checkpoint.fingerprints")


def test_the_hashes_of_replicas_next_samples_add_up_to_those_of_the_batch(
    tmp_path, monkeypatch
) -> None:
    """Whatever is dealt to whom, in whatever order; one of the ranks that share a sequence counts
    it.
    """
    plan, asked, place = changed(small_plan(tmp_path, iters=3), "run", skip="1"), list[Batch](), [0]
    monkeypatch.setattr(fingerprints.parallel_state, "get_context_parallel_rank", lambda: place[0])
    rows = np.arange(8 * 65).reshape(8, 65)

    def hashed(*numbers: int) -> int:
        held = [
            SimpleNamespace(tokens=torch.from_numpy(rows[list(part)]))
            for part in (numbers[:2], numbers[2:])
        ]
        loader = SimpleNamespace(microbatches=lambda batch: asked.append(batch) or held)
        found = fingerprints.lookahead(plan, loader, 0)
        assert (
            found["next_lr"] == plan.optimizer.learning_rate(16, 24) and len(found["samples"]) == 16
        )
        return int(found["samples"], 16)

    assert (hashed(0, 3, 5, 6) + hashed(7, 1, 4, 2)) % 2**64 == hashed(*range(8)) > 0
    assert {*asked} == {Batch(number=2, first=8, gbs=8)}
    place[0] = 1
    assert hashed(0, 1) == 0 and len(asked) == 3
    assert fingerprints.lookahead(plan, None, 3) == {"next_lr": None, "samples": None}
