"""The health of a node's GPUs as nvidia-smi reports it: how many, memory in use, ECC errors, remapped rows."""

import subprocess
from collections.abc import Callable, Sequence

# Before a training nothing else should be there: a driver's context takes less, a forgotten process more.
MOST_USED_BYTES = 2 * 2**30
PATIENCE_S = 20.0  # for nvidia-smi, which takes a second or two a GPU without its persistence daemon
FALSE = ("", "0", "no", "[n/a]", "n/a", "[not supported]")

Query = Callable[[str, Sequence[str]], list[list[str]]]


def query(what: str, names: Sequence[str]) -> list[list[str]]:
    """The rows of `nvidia-smi --query-WHAT`, a cell for each name; empty where it is missing, fails or lacks a name."""
    command = ["nvidia-smi", f"--query-{what}={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(names)] if done.returncode == 0 else []


def findings(gpus: int, ask: Query = query) -> tuple[list[str], list[str]]:
    """(what makes the node useless, what makes another node preferable), of its GPUs; both empty without nvidia-smi.

    A failed remapping is a reason to replace the GPU; an uncorrectable error and a pending remapping only ask for a
    reset, and until then a new process neither computes wrongly nor more slowly:
    https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html. `gpus` is how many
    the training needs, 0 on CPUs.
    """
    broken, doubtful = list[str](), list[str]()
    cards = ask("gpu", ("index", "memory.used"))
    if cards and len(cards) < gpus:
        broken.append(f"{len(cards)} of {gpus} GPUs")
    for index, used in cards:
        if used.isdecimal() and int(used) * 2**20 > MOST_USED_BYTES:
            broken.append(f"GPU {index}: {int(used) / 1024:.1f} GiB in use before the training")
    for index, errors in ask("gpu", ("index", "ecc.errors.uncorrected.volatile.total")):
        if errors.isdecimal() and int(errors):
            doubtful.append(f"GPU {index}: {errors} uncorrectable ECC errors since its last reset")
    for index, pending in ask("gpu", ("index", "retired_pages.pending")):
        if _is_true(pending):
            doubtful.append(f"GPU {index}: pages to be retired at its next reset")
    for bus, pending, failure in ask("remapped-rows", ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")):
        if _is_true(failure):
            broken.append(f"GPU {bus}: its memory has no rows left to remap")
        elif _is_true(pending):
            doubtful.append(f"GPU {bus}: rows to be remapped at its next reset")
    return broken, doubtful


def _is_true(cell: str) -> bool:
    return cell.lower() not in FALSE
