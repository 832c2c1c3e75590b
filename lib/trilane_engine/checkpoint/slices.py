"""Slices of tensors in a file in safetensors' format: written one by one, read in part, never
unpickled.

8 bytes: length of the header, little endian; the header, JSON: name -> dtype, shape, byte range
after the header; then the values. Source: the format's description in huggingface/safetensors'
README.
"""

import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilane.utils.validation import require
from trilane.workspace.checkpoints import checksum
from trilane_engine.model.parameters import Box


def write_slices(
    path: Path, entries: Sequence[tuple[str, tuple[int, ...]]], tensors: Iterable[Tensor]
) -> tuple[dict[str, int], list[Any]]:
    """Write tensors of these names and shapes, fp32, one by one: the first byte of each, and [size,
    checksum].

    OSError (a full disk) where all of it is not on the disk.
    """
    header, at = _header(entries)
    size = 0
    crc = 0
    with path.open("xb", buffering=0) as file:
        for data in itertools.chain([memoryview(header)], map(_bytes, tensors)):
            while len(data):
                # what is summed up next is still in the processor's cache
                done = file.write(data[: 1 << 22])
                crc = zlib.crc32(data[:done], crc)
                data = data[done:]
                size += done
        os.fsync(file.fileno())
    return at, [size, checksum(crc)]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy().data.cast("B")


def _header(entries: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header, padded to 8 bytes, and the first byte of each tensor in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    starts: dict[str, int] = {}
    end = 0
    for name, shape in entries:
        starts[name] = end
        end += 4 * math.prod(shape)
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def boxes_of(box: Box, values: tuple[int, int]) -> list[tuple[Box, int, int]]:
    """The range `values` of the part `box`, flattened, as boxes of the tensor: each with its place
    and its size.

    Of a matrix at most three: the end of a row, whole rows, the beginning of a row.
    """
    first, end = values
    if first == end:
        return []
    inner = math.prod(b - a for a, b in box[1:])
    top = box[0][0]
    boxes: list[tuple[Box, int, int]] = []
    at = first
    while at < end:
        row, column = divmod(at, inner)
        place = at - first
        if column or end - at < inner:  # a part of one row
            last = min(end, (row + 1) * inner)
            for inside, start, size in boxes_of(box[1:], (column, column + last - at)):
                boxes.append((((top + row, top + row + 1), *inside), place + start, size))
        else:
            last = end - end % inner
            boxes.append((((top + row, top + last // inner), *box[1:]), place, last - at))
        at = last
    return boxes


def within(wanted: Sequence[tuple[int, int]], held: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    """The index of the part `wanted` in an array that has the part `held`."""
    sides = zip(wanted, held, strict=True)
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in sides)


def read_rows(
    path: Path, at: int, held: Box, wanted: Sequence[tuple[int, int]], target: np.ndarray
) -> None:
    """Read the part `wanted` of the slice `held`, which begins at byte `at` of the file, into
    `target`.
    """
    inner = tuple(d - c for c, d in held[1:])
    # Whole rows are read: page by page, as memory that is mapped, takes twice the time.
    first = at + 4 * (wanted[0][0] - held[0][0]) * math.prod(inner)
    values = np.fromfile(path, np.float32, len(target) * math.prod(inner), offset=first)
    rows = values.reshape(len(target), *inner)
    target[...] = rows[:, *within(wanted[1:], held[1:])]


def assemble(
    folder: Path,
    slices: Iterable[Mapping[str, Any]],
    kind: str,
    box: Box,
    read: Callable[..., None] = read_rows,
) -> Tensor:
    """The part `box` of a tensor, fp32, assembled from those of its slices (as in the manifest)
    that overlap it.

    `read` reads a part of a slice in another file than ours, as read_rows() does.
    """
    size = [end - first for first, end in box]
    result = np.empty(size, np.float32)
    filled = 0
    for piece in slices:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece["box"], strict=True)]
        if all(first < end for first, end in common):
            target = result[within(common, box)]
            file = folder / piece["file"]
            read(file, piece["at"][kind], piece["box"], common, target)
            filled += target.size
    rule = f"{filled} of {result.size} numbers are in its slices"
    require(filled == result.size, "checkpoint", folder, rule)
    return torch.from_numpy(result)


def assemble_range(
    folder: Path, slices: Sequence[Mapping[str, Any]], kind: str, box: Box, values: tuple[int, int]
) -> Tensor:
    """The range `values` of the part `box` of a tensor, flat, assembled like the whole part."""
    parts = [torch.empty(0)]
    for part, _, _ in boxes_of(box, values):
        parts.append(assemble(folder, slices, kind, part).reshape(-1))
    # a large tensor is not copied
    if len(parts) == 2:
        return parts[1]
    return torch.cat(parts)
