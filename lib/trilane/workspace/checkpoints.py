"""Checkpoints on disk: which are complete, reading and writing their manifest, publishing and deleting; without torch.

checkpoints/latest                the name of the newest complete one, such as iter_0000020
checkpoints/iter_0000020/         complete: a checkpoint gets this name only when finished
    manifest.json                 sizes and checksums of all files, the place of each tensor, the training's settings
    rank_00000.safetensors        the slices of tensors that this rank wrote, fp32
    rank_00000.json               this rank's random number generators
    fingerprint_00000.json        this rank's state in a few numbers per tensor (fingerprints.py)
checkpoints/.iter_0000020.x1y2    being written, or left by a save that was killed
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from trilane.config.model import ModelShape
from trilane.utils.files import read_text, replace_text, sync_folder

FOLDER = "checkpoints"
LATEST = "latest"
MANIFEST = "manifest.json"
CHUNK = 1 << 20  # bytes of one CRC-32 (checksums of files)
TASK = 64  # chunks that one thread checks at a time
KINDS = ("weight", "exp_avg", "exp_avg_sq")  # of each parameter, all fp32: the master weight and Adam's two moments
FILE = re.compile(r"\w[\w.-]*")  # a name in the folder itself
NAME = re.compile(r"iter_(\d{7,})")


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of one checkpoint: 12 per parameter, for every precision, topology and engine.

    Left out: the manifest (about 0.4 kB per tensor and tensor-parallel rank), the generators (some 10 kB per rank) and
    the fingerprints (about 0.9 kB per tensor and rank).
    """
    return 4 * len(KINDS) * shape.parameters


def name_of(iteration: int) -> str:
    """The folder name of the checkpoint after that iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int:
    """The iteration after which the checkpoint was taken, by its folder name."""
    return int(path.name.removeprefix("iter_"))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first; `folder` may also be one checkpoint itself."""
    if (folder / MANIFEST).exists():
        return [folder]
    found = [path for path in folder.glob("iter_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=iteration_of)


def found_in(source: Path) -> list[Path]:
    """The complete checkpoints of a run folder, a folder of checkpoints, or one checkpoint, oldest first."""
    inside = source / FOLDER if (source / FOLDER).is_dir() else source
    return complete(inside) if inside.is_dir() else []


def leftovers(folder: Path) -> list[Path]:
    """Files left by killed saves and interrupted deletions; nothing refers to them."""
    return [path for path in folder.glob(".*") if path.name.startswith((".iter_", f".{LATEST}"))]


def latest(folder: Path) -> Path | None:
    """The checkpoint that the file `latest` names; None where there is none yet.

    Where the file is damaged, or names one that is gone: the newest complete checkpoint.
    """
    if not (folder / LATEST).exists():
        return None
    name = read_text(folder / LATEST).strip() if (folder / LATEST).is_file() else ""
    if NAME.fullmatch(name) and (folder / name).is_dir():
        return folder / name
    return next(reversed(complete(folder)), None)


class Checksum:
    """The checksum of bytes that come in parts.

    Up to CHUNK bytes: BLAKE2b, 128 bits, as `b2sum -l 128` prints it. Of more: "crc32:" and BLAKE2b of the chunks'
    CRC-32, each as 4 bytes, little endian: 2.2 GB/s on a core instead of 0.9, on several cores if need be, and the
    damage of a chunk is missed in one case of 2^32. Checkpoints of 2026-11-22 and before have BLAKE2b for every size.
    """

    def __init__(self) -> None:
        self._plain = _blake2b()
        self._chunks: list[int] = []
        self._left = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        view = memoryview(data)
        if len(self._chunks) < 2:
            self._plain.update(view[: CHUNK + 1])  # of more bytes it is not used
        while view:
            if not self._left:
                self._chunks.append(0)
                self._left = CHUNK
            part, view = view[: self._left], view[self._left :]
            self._chunks[-1] = zlib.crc32(part, self._chunks[-1])
            self._left -= len(part)

    def text(self) -> str:
        """The checksum of all bytes so far."""
        return _joined(self._chunks) if len(self._chunks) > 1 else self._plain.hexdigest()


def _blake2b(data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=16)


def _joined(chunks: Sequence[int]) -> str:
    return f"crc32:{_blake2b(b''.join(crc.to_bytes(4, 'little') for crc in chunks)).hexdigest()}"


def digest(path: Path, threads: int = 1) -> str:
    """The Checksum of the file's bytes, computed by so many threads."""
    size = path.stat().st_size
    if size <= CHUNK:
        return _blake2b(path.read_bytes()).hexdigest()

    def chunks(start: int) -> list[int]:
        found, block = [], bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            for _ in range(min(TASK, -(-(size - start) // CHUNK))):
                found.append(zlib.crc32(memoryview(block)[: _filled(file, block)]))
        return found

    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(chunks, range(0, size, TASK * CHUNK))
        return _joined([crc for part in found for crc in part])


def _filled(file: IO[bytes], block: bytearray) -> int:
    """Read until the block is full or the file ends; the number of bytes."""
    count = 0
    while more := file.readinto(memoryview(block)[count:]):  # type: ignore[attr-defined]
        count += more
    return count


def is_intact(path: Path, checksum: str, threads: int = 1) -> bool:
    """Whether the file has that checksum, one of digest() or a plain one."""
    if checksum.startswith("crc32:"):
        return digest(path, threads) == checksum
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest() == checksum


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write manifest.json, with a checksum of its content."""
    replace_text(folder / MANIFEST, json.dumps(_sealed(content), sort_keys=True) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of manifest.json; ValueError where it is missing or damaged."""
    path = folder / MANIFEST
    try:
        read = json.loads(path.read_bytes())
        if read == _sealed(read["content"]) and is_sound(read["content"]):
            return read["content"]
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{MANIFEST} is damaged")


def is_sound(content: dict[str, Any]) -> bool:
    """Whether a manifest names files of its own folder, each slice lies inside its file, and slices fill each tensor.

    Raises KeyError, TypeError or ValueError where a part is missing.
    """
    tensors, files = content.get("tensors", {}).values(), content.get("files", {})
    if not all(FILE.fullmatch(name) for name in files) or content.get("iteration", 0) < 0:
        return False
    if tensors and not (isinstance(content["identity"]["shape"], dict) and content["consumed_samples"] >= 0):
        return False
    for tensor in tensors:
        held = 0
        for piece in tensor["slices"]:
            inside = [0 <= first <= end <= n for (first, end), n in zip(piece["box"], tensor["shape"], strict=True)]
            count = math.prod(end - first for first, end in piece["box"])
            starts = [piece["at"][kind] for kind in KINDS]
            last = files[piece["file"]][0] - 4 * count
            if not all(inside) or len(inside) not in (1, 2, 3):
                return False
            if not all(type(start) is int and 0 <= start <= last for start in starts):
                return False
            held += count
        if math.prod(tensor["shape"]) > held:
            return False
    return True


def fault(folder: Path, name: str, size: int, checksum: str, threads: int = 1) -> str | None:
    """What is wrong with the file `name` of the checkpoint `folder`; None where it is as written."""
    path = folder / name
    try:
        if path.exists() and not path.is_file():
            return f"{name} is no file"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
        return None if is_intact(path, checksum, threads) else f"{name} is damaged (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def publish(aside: Path, target: Path) -> None:
    """Rename the finished checkpoint `aside` to `target`, and let `latest` name it; both are on the disk afterwards.

    An existing checkpoint of that name was found damaged, or its iterations were trained again: it is deleted.
    """
    sync_folder(aside)
    if target.exists():
        discard(target)
    os.rename(aside, target)
    sync_folder(target.parent)
    replace_text(target.parent / LATEST, target.name + "\n")


def keep_last(folder: Path, count: int) -> None:
    """Delete all complete checkpoints but the last `count` (0: delete none); never the one that `latest` names."""
    named = latest(folder)
    for path in complete(folder)[:-count] if count else []:
        if path != named:
            discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a partly deleted one does not look complete."""
    aside = path.with_name(f".{path.name}.deleted.{secrets.token_hex(4)}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(content, sort_keys=True).encode()
    return {"blake2b": hashlib.blake2b(text, digest_size=16).hexdigest(), "content": content}
