"""Measure this machine within seconds: `trilane measure machine [OUT.json]`.

A single process on a CPU machine starts the processes that it needs; on a machine with GPUs it becomes torchrun with
one rank each. Under torchrun or srun, one rank per GPU, all ranks measure together and rank 0 writes one file.
"""

import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

from trilane.config.cluster import Cluster
from trilane.utils.process import python
from trilane.utils.validation import print_refusal, require, to_mapping

LOCAL = "local"


def main(argv: list[str]) -> int:
    """Arguments `[OUT [NAME]]`, from `trilane measure machine`. 0 when the file is written, else 2 with one line."""
    out, name = [*argv, "", ""][:2]
    size = world_size(os.environ)
    try:
        require(out.endswith(".json") or not out, "out", out, "must end in .json")
        (_single_process if size == 1 else _all_ranks)(out, name)
    except ValueError as error:
        print_refusal(error, "trilane: ")
        return 2
    return 0


def world_size(env: MutableMapping[str, str]) -> int:
    """Processes that torchrun or srun started. A batch script has SLURM_PROCID too, but no step: it is one process."""
    return int(env["WORLD_SIZE"] if "RANK" in env else env.get("SLURM_STEP_NUM_TASKS", "1"))


def destination(out: str, name: str) -> Path:
    """The file to write, which must not exist yet, in a folder that does; ValueError otherwise."""
    path = Path(out or f"{name}.json")
    require(not path.exists(), "out", path, "exists")
    require(path.absolute().parent.is_dir(), "out", path, "its folder does not exist")
    return path


def _single_process(out: str, name: str) -> None:
    path = destination(out, name or LOCAL)  # before torch is imported: that takes seconds
    import torch

    cards = torch.cuda.device_count()
    if cards == 0:
        from trilane.engine.bench import single_process
        from trilane.engine.distributed.device import own_device

        own_device("fp32")  # raises where there is a GPU that torch cannot use
        return _write(path, single_process.measure(name or LOCAL))
    if "RANK" in os.environ:  # torchrun's only rank
        return _all_ranks(out, name)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cards}"]
    this = ["-m", "trilane.engine.bench.__main__", str(path), name or LOCAL]
    os.execvp("env", python(*ranks, *this))


def _all_ranks(out: str, name: str) -> None:
    import torch

    from trilane.engine.distributed import world as worlds

    worlds.from_slurm(os.environ)
    from trilane.engine.bench import multi_rank

    context = multi_rank.context_bytes()
    world = worlds.start_process_group("fp32")

    def target() -> tuple[Path, str]:
        chosen = name or multi_rank.plain_name(platform.node())
        return destination(out, chosen), chosen

    try:
        path, chosen = worlds.call_on_first(world, target)
        cluster = multi_rank.measure(world, context, chosen)
    except ValueError:  # on all ranks; after any other error the peers may be gone, and this could wait for them
        torch.distributed.destroy_process_group()
        raise
    if world.is_first:
        _write(path, cluster)
    torch.distributed.destroy_process_group()


def _write(path: Path, cluster: Cluster) -> None:
    from trilane.engine.checkpoint.stamp import write_json

    write_json(path, to_mapping(cluster))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
