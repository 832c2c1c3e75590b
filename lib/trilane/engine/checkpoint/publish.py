"""A checkpoint's folder while it is written: a temporary one, the files listed in its manifest, its publication."""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trilane.engine.checkpoint.slices import error_text
from trilane.engine.distributed.world import World, call_on_first
from trilane.utils.files import replace_text
from trilane.workspace import checkpoints

T = TypeVar("T")


def try_on_first(world: World, function: Callable[[], T]) -> tuple[T, str]:
    """(result, error text) of rank 0's `function()` on all ranks; "" without an OSError."""

    def attempt() -> tuple[T | None, str]:
        try:
            return function(), ""
        except OSError as error:
            return None, error_text(error)

    return call_on_first(world, attempt)  # type: ignore[return-value]


def temporary_folder(root: Path, name: str) -> str:
    """A new temporary folder next to the checkpoints; removes what killed saves left."""
    temporary = root / f".{name}.{secrets.token_hex(4)}"
    root.mkdir(exist_ok=True)
    for path in checkpoints.leftovers(root):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    temporary.mkdir()
    return str(temporary)


def write_listed(path: Path, content: Any, files: dict[str, list[Any]]) -> str:
    """Write the file and add it to `files`; the error text, or ""."""
    try:
        replace_text(path, json.dumps(content))
        files[path.name] = [path.stat().st_size, checkpoints.digest(path)]
    except OSError as error:
        return error_text(error)
    return ""


def publish(temporary: Path, target: Path, manifest: dict[str, Any], reports: list[dict[str, Any]]) -> int:
    """Write the manifest and rename; the checkpoint's bytes. OSError, with nothing left of it, where that fails."""
    errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    try:
        if errors:
            raise OSError(errno.EIO, errors[0])
        files = {name: facts for report in reports for name, facts in report["files"].items()}
        checkpoints.write_manifest(temporary, {**manifest, "files": files, "tensors": _tensors(reports)})
        checkpoints.publish(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(size for size, _ in files.values()) + os.stat(target / checkpoints.MANIFEST).st_size


def _tensors(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensor name -> shape of the whole and its slices."""
    tensors: dict[str, Any] = {}
    for report in reports:
        for piece in report["slices"]:
            tensor = tensors.setdefault(piece["name"], {"shape": piece["shape"], "slices": []})
            tensor["slices"].append({name: piece[name] for name in ("box", "file", "at")})
    return tensors
