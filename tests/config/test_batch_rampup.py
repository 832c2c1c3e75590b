"""The ramp-up of the batch size: counted as a loop over iterations would count it."""

import pytest

from trilane.config.batch_rampup import Ramp, parse_ramp
from trilane.config.parallelism import Topology

RAMPS = [
    (Ramp(start=192, increment=16, samples=97_000), 512),
    (Ramp(), 64),
    (Ramp(start=1, increment=1, samples=10), 9),
]


def walked(ramp: Ramp, gbs: int, iterations: int) -> list[int]:
    """Batch sizes one by one, by Megatron-LM's rule as it stands in the docstring."""
    sizes: list[int] = []
    for _ in range(iterations):
        consumed = sum(sizes)
        steps = (gbs - ramp.start) // ramp.increment if ramp.samples else 0
        grown = consumed < ramp.samples
        sizes.append(
            ramp.start + int(consumed * steps / ramp.samples) * ramp.increment if grown else gbs
        )
    return sizes


@pytest.mark.parametrize(("ramp", "gbs"), RAMPS)
def test_phases_and_counts_are_those_of_a_walk_through_the_iterations(ramp, gbs):
    sizes = walked(ramp, gbs, 600)
    for done in (0, 17):
        phases = ramp.between(gbs, done, 600)
        assert [phase.gbs for phase in phases for _ in range(phase.iterations)] == sizes[done:]
        assert phases[0].first == sum(sizes[:done])
    for count in (1, 2, 17, 400, 600):
        assert ramp.consumed(count, gbs) == sum(sizes[:count])
        assert ramp.iterations(sum(sizes[:count]), gbs) == count
        assert ramp.iterations(sum(sizes[:count]) + 1, gbs) == count + 1


def test_the_batch_sizes_that_a_topology_cannot_divide_are_named():
    """192, 208, ..., 2048 on DP 8 x MBS 4: every other one is no multiple of 32."""
    ramp = parse_ramp("192,16,9765625")
    with pytest.raises(ValueError, match=r"^ramp=208: every batch size"):
        ramp.require_whole(Topology(dp=8, mbs=4, gbs=256), ramp.between(256, 0, 10**6))
    ramp.require_whole(Topology(dp=8, mbs=2, gbs=2048), ramp.between(2048, 0, 10**6))


def test_a_ramp_that_leads_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"^ramp\.increment=3: must divide"):
        Ramp(start=5, increment=3, samples=9).consumed(1, 9)
