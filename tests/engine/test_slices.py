"""Files of slices: the published format, on the disk once closed, and a full disk that is reported
and not raised.
"""

import json
import os
from pathlib import Path

import pytest
from support import Later

torch, files = Later("torch"), Later("trilane_engine.checkpoint.slices")


def test_a_file_has_the_published_format_and_was_synchronised(tmp_path: Path, monkeypatch) -> None:
    """huggingface/safetensors' README: 8 bytes of length, a header that is padded with blanks to a
    multiple of 8, then the values. fsync(2): without it, a crash after the save may leave a
    complete-looking checkpoint of zeros; there a network file system reports a full disk.
    """
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    for name in ("a", "ab", "abc", "abcdefgh"):
        entries, values = [(f"{name}/weight", (3,)), (f"{name}/exp_avg", (2,))], torch.arange(5.0)
        _, (size, _) = files.write_slices(tmp_path / name, entries, values.split([3, 2]))
        content = (tmp_path / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        facts = json.loads(content[8 : 8 + length])[f"{name}/exp_avg"]
        assert length % 8 == 0 and sizes[-1] == len(content) == size == 8 + length + 20
        assert facts == {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}
        assert content[8 + length :] == values.numpy().tobytes()


@pytest.mark.parametrize(
    "box", [((3, 8),), ((2, 6), (1, 4)), ((0, 2), (1, 3), (0, 3))], ids=["1", "2", "3"]
)
def test_a_range_of_a_part_is_boxes_that_cover_it_in_order(box: tuple) -> None:
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
