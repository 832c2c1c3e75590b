"""The space of a search, at sizes that can be listed by hand."""

from trilane.config.model import parse_shape
from trilane.planning.space import Space


def test_each_way_to_cut_eight_gpus_is_looked_at_once() -> None:
    sizes = list(Space(gpus=(8,), gbs=(8,)).sizes())
    assert len(sizes) == len(set(sizes)) == 10 and {t * p * d for t, p, d in sizes} == {8}
    assert list(Space(gpus=(8,), gbs=(8,), pins={"tp": (2,), "dp": (2,)}).sizes()) == [(2, 2, 2)]


def test_blocks_of_recomputed_layers_are_no_whole_stage() -> None:
    """megatron-core counts them in each chunk of a stage: with two chunks of 5 layers, 5 would be
    recompute full.
    """
    shape, searched = parse_shape("40,5120,40,2048,50304"), Space(gpus=(4,), gbs=(8,))
    found = {
        (p["interleaving"], p["recompute_layers"])
        for p in searched.points(shape.num_layers // 4, False, True, False)
    }
    assert found == {(1, 0), (2, 0), (5, 0), (10, 0), (1, 2), (1, 5), (1, 7), (2, 2)}
    pinned = Space(gpus=(4,), gbs=(8,), pins={"recompute_layers": (5,), "interleaving": (2,)})
    assert {p["recompute"] for p in pinned.points(shape.num_layers // 4, False, True, False)} == {
        "block"
    }
