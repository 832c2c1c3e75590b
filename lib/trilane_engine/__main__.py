"""`python -m trilane_engine plan.json` under torchrun or srun, or as a single process: train the
plan in its folder.
"""

import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trilane.config.engines import require_trainable
from trilane.config.plan import Plan, read_plan
from trilane.utils.files import patient_text, set_aside
from trilane.utils.process import allow_open_files, die_with_parent
from trilane.utils.validation import print_refusal
from trilane.workspace.installation import revision
from trilane_engine.signals import Signals


def main(argv: list[str]) -> int:
    """0 after the last iteration or a requested stop; 2 with one line where it cannot be trained; 1
    otherwise.
    """
    begin = time.monotonic()
    signals = Signals()
    die_with_parent()
    allow_open_files()
    _redirect_output()
    if len(argv) != 1:
        print("usage: python -m trilane_engine plan.json", file=sys.stderr)
        return 2
    try:
        train = _prepare(Path(argv[0]), signals, begin)
    except ValueError as error:
        if not _is_refusal(error):
            raise
        print_refusal(error)
        return 2
    return train()


def _prepare(path: Path, signals: Signals, begin: float) -> Callable[[], int]:
    """The plan's training, ready to start; torch is imported only once the plan is found valid."""
    plan = read_plan(path)
    require_trainable(plan)
    limit_queues(plan, os.environ)
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    from trilane_engine import heartbeat
    from trilane_engine import world as worlds

    worlds.from_slurm(os.environ)
    worlds.single_process(os.environ)
    heartbeat.begin(plan, path.parent)
    world = worlds.join(plan)
    from trilane_engine.loop import Training
    from trilane_engine.report import write_json

    if world.is_first:
        set_aside(path.parent / "env.json")
        set_aside(path.parent / "status.json")
        (path.parent / "status.json").unlink(missing_ok=True)
        write_json(path.parent / "env.json", stamp(world))
    return Training(plan, world, path.parent, signals, begin).run


def limit_queues(plan: Plan, env: MutableMapping[str, str]) -> None:
    """Megatron-LM's CUDA_DEVICE_MAX_CONNECTIONS=1: communication is launched before the matmuls
    that it overlaps.
    """
    if plan.engine == "megatron" or plan.topology.tp > 1:
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _redirect_output() -> None:
    """Redirect stdout and stderr to ranks/<rank>.log where the launcher asks for it, so that ranks'
    lines never mix.
    """
    folder = os.environ.get("TRILANE_RANK_LOGS")
    if folder:
        path = f"{folder}/{os.environ['RANK']}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    # a full disk does not end a training
    sys.stdout = patient_text(1)
    sys.stderr = patient_text(2)


def _is_refusal(error: ValueError) -> bool:
    """Whether trilane itself raised it, for a rule that the user broke; a library's ValueError is a
    bug of ours.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def stamp(world: Any) -> dict[str, Any]:
    """The content of env.json: commit, versions, host, devices, start."""
    import torch

    versions = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "deepspeed", "numpy", "tokenizers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "git": revision(),
        "versions": versions,
        "host": platform.node(),
        "world_size": world.size,
        "devices": cards or ["cpu"],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        # A rank that fails because a peer died waits before it exits, so that torchrun, which polls
        # ten times a second and stops at the first dead worker, sees the peer: a killed process may
        # close its connections before it ends.
        time.sleep(1.0)
        code = 1
    # At once: a normal exit waits for the other ranks and would hide which rank failed first.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
