"""The space of a search, at sizes that can be listed by hand."""

from trilane.config.model import parse_shape
from trilane.planning.space import VARIED, Space

SHAPE = parse_shape("40,5120,40,2048,50304")
EVEN = {"first_stage_layers": (0,), "last_stage_layers": (0,), "partition": ("uniform",)}


def test_each_way_to_cut_eight_gpus_is_looked_at_once():
    sizes = list(Space(gpus=(8,), gbs=8).sizes())
    assert len(sizes) == len(set(sizes)) == 20
    assert {t * p * d * c for t, p, d, c, _ in sizes} == {8}
    pins = {"tp": (2,), "dp": (2,), "cp": (1,)}
    assert list(Space(gpus=(8,), gbs=8, pins=pins).sizes()) == [(2, 2, 2, 1, 1)]
    assert {c for *_, c, _ in Space(gpus=(8,), gbs=8, engine="deepspeed-3d").sizes()} == {1}


def test_blocks_of_recomputed_layers_are_no_whole_stage():
    """megatron-core counts them in each chunk of a stage: with two chunks of 5 layers, 5 would be
    recompute full.
    """

    def points(**pins: tuple[int, ...]) -> list[dict[str, int]]:
        found = Space(gpus=(4,), gbs=8, pins=EVEN | pins).points(SHAPE, 4, False, False)
        return [dict(zip(VARIED, row, strict=True)) for row in found.rows]

    found = {(p["interleaving"], p["recompute_layers"]) for p in points()}
    every = {(1, layers) for layers in range(10)} | {(2, layers) for layers in range(5)}
    assert found == every | {(5, 0), (5, 1), (10, 0)}
    pinned = points(recompute_layers=(5,), interleaving=(2,))
    assert {p["recompute"] for p in pinned} == {"block"}


def test_stages_with_a_number_of_layers_are_lighter_than_the_others_and_share_the_rest():
    found = Space(gpus=(4,), gbs=8).points(SHAPE, 4, False, False)
    ends = {row[1:3] for row in found.rows}
    assert {(0, 0), (9, 9)} <= ends and not {(7, 7), (8, 9), (0, 7)} & ends
    assert all((40 - first - last) % (4 - (first > 0) - (last > 0)) == 0 for first, last in ends)
