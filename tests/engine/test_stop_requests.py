"""What a signal that does not reach all ranks at one time asks for."""

import math
import types
from pathlib import Path

import pytest

from trilane.config.training import Run

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported


@pytest.mark.parametrize(
    ("received", "saves"),
    [
        ({0: [100]}, [100]),
        ({0: [100], 1: [100]}, [100]),
        ({0: [100.9], 1: [101.1]}, [101]),  # on both sides of an iteration's end
        ({1: [100.9], 0: [101.1, 101.2]}, [101]),  # from srun and from the launcher
        ({1: [100], 0: [160]}, [100, 160]),  # asked twice
    ],
    ids=["one rank", "both", "late", "twice", "again"],
)
def test_one_signal_saves_once(
    received: dict[int, list[float]], saves: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set by hand, a second per iteration; the two ranks agree in turn, as their all-reduce has it."""
    import torch

    from trilane.engine import stop_requests

    now, agreed = [0.0], torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(stop_requests, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(stop_requests.dist, "all_reduce", lambda mine, op: mine.copy_(torch.maximum(mine, agreed)))
    signals = [types.SimpleNamespace(save_s=-math.inf, stop=False) for _ in range(2)]
    ranks = []
    for n in range(2):
        world = types.SimpleNamespace(is_first=n == 0, device="cpu")
        ranks.append(stop_requests.StopRequests(tmp_path, Run(), world, signals[n], 0))  # type: ignore[arg-type]
    found = []
    for second in range(95, 170):
        now[0] = float(second)
        for n, times in received.items():
            signals[n].save_s = max((s for s in times if s <= second), default=-math.inf)
        agreed = torch.tensor([max(rank._pending() for rank in ranks), 0])
        requests = {rank.now() for rank in ranks}
        assert len(requests) == 1, "the same on all ranks"
        found += [second for request in requests if request.save]
    assert found == saves
