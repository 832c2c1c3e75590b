"""env.json: software versions, host, devices and start of a run, so that its results can be traced."""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from trilane.engine.distributed.world import World, cores
from trilane.utils.files import replace_text
from trilane.workspace.installation import frozen, revision


def stamp(world: World) -> dict[str, Any]:
    """The content of env.json: commit, versions, host, devices, cores, threads, start, command."""
    packages = ("torch", "megatron-core", "deepspeed", "numpy", "tokenizers")
    return {
        "git": git_revision(Path(__file__).parent),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "host": platform.node(),
        "platform": platform.platform(),
        "world_size": world.size,
        "processes_per_host": world.local_size,
        "devices": devices(),
        "backend": torch.distributed.get_backend(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
    }


def devices() -> list[str]:
    """The names of this host's GPUs, or "cpu"."""
    if not torch.cuda.is_available():
        return ["cpu"]
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def git_revision(folder: Path) -> str:
    """The commit of the checkout that holds `folder`, "+dirty" where its files differ; "unknown" outside git.

    A frozen copy may lie in a checkout that has changed since: of it that which it was made of.
    """
    if frozen():
        return revision()
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        dirty = bool(_git(folder, "status", "--porcelain", "--", ".").strip())
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + "+dirty" * dirty


def _git(folder: Path, *args: str) -> str:
    command = ["git", "-C", str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def write_json(path: Path, values: Any) -> None:
    """Write `values` as JSON under a temporary name, then rename: a reader never sees a partial file."""
    replace_text(path, json.dumps(values, indent=2) + "\n")
