"""Slices of tensors in a file in safetensors' format: written one by one, read in part, never unpickled.

8 bytes: length of the header, little endian; the header, JSON: name -> dtype, shape, byte range after the header; then
the values. Source: the format's description in huggingface/safetensors' README.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trilane.engine.model.parameters import Box
from trilane.utils.validation import require

FLOAT_BYTES = 4


class SliceFile:
    """One file of fp32 tensors with names and shapes known in advance; add() them in that order.

    An OSError (a full disk) is kept as `error` and later calls do nothing, so that the caller can continue the
    collectives that other ranks wait for.
    """

    def __init__(self, path: Path, entries: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        header, self.at = _header(list(entries))
        self.size, self.error = 0, ""
        self._digest = hashlib.blake2b(digest_size=16)
        try:
            self._file = path.open("xb")
        except OSError as error:
            self.error = error_text(error)
        self._write(header)

    def add(self, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        values = tensor.detach().to("cpu", torch.float32).contiguous()
        self._write(values.numpy().data.cast("B"))

    def close(self) -> list[Any]:
        """Flush to disk and close; [size, checksum]."""
        try:
            if not self.error:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error_text(error)
        self._close()
        return [self.size, self._digest.hexdigest()]

    def _write(self, data: bytes | memoryview) -> None:
        if self.error:
            return
        try:
            self._file.write(data)
            self._digest.update(data)
            self.size += len(data)
        except OSError as error:
            self.error = error_text(error)

    def _close(self) -> None:
        # not opened, or its last bytes not written: `error` holds it
        with contextlib.suppress(OSError, AttributeError):
            self._file.close()


def error_text(error: OSError) -> str:
    """The system's message, such as "No space left on device"."""
    return error.strerror or str(error)


def _header(entries: list[tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header, padded to 8 bytes, and the first byte of each tensor in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, shape in entries:
        first, end = end, end + FLOAT_BYTES * int(np.prod(shape, dtype=np.int64))
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + table[n]["data_offsets"][0] for n, _ in entries}


def assemble(folder: Path, slices: Iterable[Mapping[str, Any]], kind: str, box: Box) -> torch.Tensor:
    """The part `box` of a tensor, fp32, assembled from those of its slices (as in the manifest) that overlap it."""
    size = [end - first for first, end in box]
    try:
        result, filled = np.empty(size, np.float32), 0
    except MemoryError:
        raise ValueError(f"checkpoint={folder}: a tensor of {size} does not fit in memory") from None
    for piece in slices:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece["box"], strict=True)]
        if any(first >= end for first, end in common):
            continue
        shape = tuple(d - c for c, d in piece["box"])
        held = np.memmap(folder / piece["file"], np.float32, "r", piece["at"][kind], shape)
        there = tuple(slice(first - c, end - c) for (first, end), (c, _) in zip(common, piece["box"], strict=True))
        here = tuple(slice(first - a, end - a) for (first, end), (a, _) in zip(common, box, strict=True))
        result[here] = held[there]
        filled += int(np.prod([end - first for first, end in common]))
    require(filled == result.size, "checkpoint", folder, f"{filled} of {result.size} numbers are in its slices")
    return torch.from_numpy(result)
