"""Checkpoints on disk: which are complete, reading and writing their manifest, publishing and
deleting; without torch.

checkpoints/iter_0000020/         complete: a checkpoint gets this name only when finished
    manifest.json                 checksums of all files, the place of each tensor, the settings
    rank_00000.safetensors        the slices of tensors that this rank wrote, fp32
    rank_00000.json               this rank's random number generators
    fingerprint_00000.json        this rank's state in a few numbers per tensor (fingerprints.py)
checkpoints/.iter_0000020.x1y2    being written, or left by a save that was killed
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import zlib
from pathlib import Path

from trilane.config.model import ModelShape
from trilane.utils.files import replace_text, sync_folder
from trilane.utils.tables import Json

FOLDER = "checkpoints"
KINDS = (
    "weight",
    "exp_avg",
    "exp_avg_sq",
)  # of each parameter, all fp32: the master weight and Adam's two moments


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of one checkpoint: 12 per parameter, for every precision, topology and engine.

    Left out: the manifest, the generators and the fingerprints, some 10 kB per rank and 1 kB per
    tensor and rank.
    """
    return 4 * len(KINDS) * shape.parameters


def name_of(iteration: int) -> str:
    """The folder name of the checkpoint after that iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int:
    """The iteration after which the checkpoint was taken, by its folder name."""
    return int(path.name.removeprefix("iter_"))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first; `folder` may also be one checkpoint
    itself.
    """
    if (folder / "manifest.json").exists():
        return [folder]
    paths = [path for path in folder.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name)]
    return sorted(filter(Path.is_dir, paths), key=iteration_of)


def found_in(source: Path) -> list[Path]:
    """The complete checkpoints of a run folder, a folder of checkpoints, or one checkpoint, oldest
    first.
    """
    return complete(source / FOLDER if (source / FOLDER).is_dir() else source)


def leftovers(folder: Path) -> list[Path]:
    """Folders left by killed saves and interrupted deletions; nothing refers to them."""
    return list(folder.glob(".iter_*"))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; None where there is none yet."""
    return next(reversed(complete(folder)), None)


def checksum(crc: int) -> str:
    """The text of a CRC-32, as the manifest has it."""
    # zlib's makes 2 GB/s on a core, BLAKE2b 0.9; a damage is missed in one case of 2^32
    return f"crc32:{crc:08x}"


def digest(path: Path) -> str:
    """The checksum of the file's bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return checksum(crc)


def write_manifest(folder: Path, content: Json) -> None:
    """Write manifest.json, with a checksum of its content."""
    replace_text(folder / "manifest.json", json.dumps(_sealed(content), sort_keys=True) + "\n")


def read_manifest(folder: Path) -> Json:
    """The content of manifest.json; ValueError where it is missing or damaged."""
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    ):
        read = json.loads((folder / "manifest.json").read_bytes())
        if read == _sealed(read["content"]) and _is_sound(read["content"]):
            return read["content"]
    raise ValueError("manifest.json is missing or damaged")


def _is_sound(content: Json) -> bool:
    """Whether a manifest names files of its own folder, each slice lies inside its file, and slices
    fill each tensor.

    Raises KeyError, TypeError or ValueError where a part is missing.
    """
    # whoever writes a hostile one can seal it, too
    files = content.get("files", {})
    ok = all(re.fullmatch(r"\w[\w.-]*", name) for name in files)
    if not ok or content.get("iteration", 0) < 0:
        return False
    tensors = content.get("tensors", {})
    if tensors:
        has_shape = isinstance(content["identity"]["shape"], dict)
        if not has_shape or content["consumed_samples"] < 0:
            return False
    for tensor in tensors.values():
        if len(tensor["shape"]) not in (1, 2, 3):
            return False
        held = 0
        for piece in tensor["slices"]:
            for (first, end), size in zip(piece["box"], tensor["shape"], strict=True):
                if not 0 <= first <= end <= size:
                    return False
            count = math.prod(end - first for first, end in piece["box"])
            last = files[piece["file"]][0] - 4 * count
            starts = [piece["at"][kind] for kind in KINDS]
            if not all(type(start) is int and 0 <= start <= last for start in starts):
                return False
            held += count
        if math.prod(tensor["shape"]) > held:
            return False
    return True


def fault(folder: Path, name: str, checksum: str) -> str | None:
    """What is wrong with the file `name` of a checkpoint; None where it is as written."""
    try:
        if digest(folder / name) == checksum:
            return None
        return f"{name} is damaged (its checksum differs)"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def publish(aside: Path, target: Path) -> None:
    """Rename the finished checkpoint `aside` to `target`; it is on the disk afterwards."""
    sync_folder(aside)
    if target.exists():  # it was found damaged, or its iterations were trained again
        discard(target)
    os.rename(aside, target)
    sync_folder(target.parent)


def keep_last(folder: Path, count: int) -> None:
    """Delete all complete checkpoints but the last `count` (0: delete none)."""
    for path in complete(folder)[:-count] if count else []:
        discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint."""
    # It is renamed first, so that a partly deleted one does not look complete.
    aside = path.with_name(f".{path.name}.deleted.{secrets.token_hex(4)}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sealed(content: Json) -> Json:
    text = json.dumps(content, sort_keys=True).encode()
    return {"blake2b": hashlib.blake2b(text, digest_size=16).hexdigest(), "content": content}
