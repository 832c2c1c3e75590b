"""Files of slices: the published format, on the disk once closed, and a full disk that is reported
and not raised.
"""

import os

import pytest
from support import Later

torch, files = Later("torch"), Later("trilane_engine.checkpoint.slices")


def test_a_file_has_the_published_format_and_was_synchronised(tmp_path, monkeypatch):
    """By huggingface/safetensors. fsync(2): without it, a crash after the save may leave a
    complete-looking checkpoint of zeros; there a network file system reports a full disk.
    """
    from safetensors.torch import load_file

    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    entries = [("weight", (3,)), ("exp_avg", (2,))]
    values = torch.arange(5.0)
    _, (size, _) = files.write_slices(tmp_path / "file", entries, values.split([3, 2]))
    assert sizes == [size] == [(tmp_path / "file").stat().st_size]
    assert torch.equal(torch.cat([*load_file(tmp_path / "file").values()]).sort()[0], values)


@pytest.mark.parametrize("box", [((2, 6), (1, 4)), ((0, 2), (1, 3), (0, 3))], ids=["2", "3"])
def test_a_range_of_a_part_is_boxes_that_cover_it_in_order(box: tuple):
    """Every range of a vector, a matrix and a pair of matrices; a matrix's has at most
    three boxes.
    """
    whole = torch.arange(8 ** len(box)).view((8,) * len(box))
    part = whole[tuple(slice(*side) for side in box)].reshape(-1)
    for first in range(len(part)):
        for end in range(first, len(part) + 1):
            found, at = files.boxes_of(box, (first, end)), 0
            for inside, place, count in found:
                values = whole[tuple(slice(*side) for side in inside)].reshape(-1)
                assert (place, count) == (at, len(values))
                assert torch.equal(values, part[first + at : first + at + count])
                at += count
            assert at == end - first and len(found) <= 2 * len(box) - 1
