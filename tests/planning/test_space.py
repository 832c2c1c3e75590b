"""The space of a search, at sizes that can be listed by hand."""

from trilane.config.model import parse_shape
from trilane.planning.space import Space

SHAPE = parse_shape("40,5120,40,2048,50304")


def test_each_way_to_cut_eight_gpus_is_looked_at_once():
    sizes = list(Space(gpus=(8,), gbs=8).sizes())
    assert len(sizes) == len(set(sizes)) == 20
    assert {t * p * d * c for t, p, d, c, *_ in sizes} == {8}
    pins = {"tp": (2,), "dp": (2,), "cp": (1,)}
    assert list(Space(gpus=(8,), gbs=8, pins=pins).sizes()) == [(2, 2, 2, 1, 1, 1, 0)]
    assert {s[3] for s in Space(gpus=(8,), gbs=8, engine="deepspeed-3d").sizes()} == {1}


def test_stages_with_a_number_of_layers_are_lighter_than_the_others_and_share_the_rest():
    found = Space(gpus=(4,), gbs=8).points(SHAPE, 4, False, False)
    ends = {row[1:3] for row in found.rows}
    assert {(0, 0), (9, 9)} <= ends and not {(7, 7), (8, 9), (0, 7)} & ends
    assert all((40 - first - last) % (4 - (first > 0) - (last > 0)) == 0 for first, last in ends)
