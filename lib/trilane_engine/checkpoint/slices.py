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

from trilane.utils.validation import require
from trilane.workspace.checkpoints import checksum
from trilane_engine.model.parameters import Box


def write_slices(
    path: Path, entries: Sequence[tuple[str, tuple[int, ...]]], tensors: Iterable[torch.Tensor]
) -> tuple[dict[str, int], list[Any]]:
    """Write tensors of these names and shapes, fp32, one by one: the first byte of each, and [size,
    checksum].

    OSError (a full disk) where all of it is not on the disk.
    """
    header, at = _header(entries)
    size, crc = 0, 0
    with path.open("xb", buffering=0) as file:
        for data in itertools.chain([memoryview(header)], map(_bytes, tensors)):
            while len(data):
                done = file.write(
                    data[: 1 << 22]
                )  # what is summed up next is still in the processor's cache
                crc = zlib.crc32(data[:done], crc)
                data, size = data[done:], size + done
        os.fsync(file.fileno())
    return at, [size, checksum(crc)]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy().data.cast("B")


def _header(entries: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header, padded to 8 bytes, and the first byte of each tensor in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, shape in entries:
        first, end = end, end + 4 * math.prod(shape)
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        n: start + table[n]["data_offsets"][0] for n, _ in entries
    }


def boxes_of(box: Box, values: tuple[int, int]) -> list[tuple[Box, int, int]]:
    """The range `values` of the part `box`, flattened, as boxes of the tensor: each with its place
    and its size.

    Of a matrix at most three: the end of a row, whole rows, the beginning of a row.
    """
    first, end = values
    if first == end:
        return []
    inner = math.prod(b - a for a, b in box[1:])
    top, offset = box[0][0], first
    found: list[tuple[Box, int, int]] = []
    while first < end:
        row, at = divmod(first, inner)
        if at or end - first < inner:  # a part of one row
            last = min(end, (row + 1) * inner)
            parts = boxes_of(box[1:], (at, at + last - first))
            found += [
                (((top + row, top + row + 1), *b), first - offset + start, n)
                for b, start, n in parts
            ]
        else:
            last = end - end % inner
            found.append(
                (((top + row, top + last // inner), *box[1:]), first - offset, last - first)
            )
        first = last
    return found


def assemble(
    folder: Path,
    slices: Iterable[Mapping[str, Any]],
    kind: str,
    box: Box,
    read: Callable[..., None] | None = None,
) -> torch.Tensor:
    """The part `box` of a tensor, fp32, assembled from those of its slices (as in the manifest)
    that overlap it.

    `read` reads a part of a slice in another file than ours, as _read() does.
    """
    size = [end - first for first, end in box]
    try:
        result, filled = np.empty(size, np.float32), 0
    except MemoryError:
        raise ValueError(
            f"checkpoint={folder}: a tensor of {size} does not fit in memory"
        ) from None
    for piece in slices:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece["box"], strict=True)]
        if all(first < end for first, end in common):
            here = tuple(
                slice(first - a, end - a) for (first, end), (a, _) in zip(common, box, strict=True)
            )
            (read or _read)(
                folder / piece["file"], piece["at"][kind], piece["box"], common, result[here]
            )
            filled += math.prod(end - first for first, end in common)
    require(
        filled == result.size,
        "checkpoint",
        folder,
        f"{filled} of {result.size} numbers are in its slices",
    )
    return torch.from_numpy(result)


def assemble_range(
    folder: Path, slices: Sequence[Mapping[str, Any]], kind: str, box: Box, values: tuple[int, int]
) -> torch.Tensor:
    """The range `values` of the part `box` of a tensor, flat, assembled like the whole part."""
    parts = [
        assemble(folder, slices, kind, part).reshape(-1) for part, _, _ in boxes_of(box, values)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)


def _read(
    path: Path, at: int, held: Box, wanted: Sequence[tuple[int, int]], target: np.ndarray
) -> None:
    """Read the part `wanted` of the slice `held`, which begins at byte `at` of the file, into
    `target`.
    """
    shape = tuple(d - c for c, d in held)
    if [tuple(side) for side in wanted[1:]] == [tuple(side) for side in held[1:]]:
        # One run of bytes is read as such: page by page, as memory that is mapped, takes twice the
        # time.
        first = at + 4 * (wanted[0][0] - held[0][0]) * math.prod(shape[1:])
        values = np.fromfile(path, np.float32, target.size, offset=first)
        require(values.size == target.size, "checkpoint", path.parent, f"{path.name} is cut short")
        target[...] = values.reshape(target.shape)
        return
    mapped = np.memmap(path, np.float32, "r", at, shape)
    target[...] = mapped[
        tuple(slice(first - c, end - c) for (first, end), (c, _) in zip(wanted, held, strict=True))
    ]
