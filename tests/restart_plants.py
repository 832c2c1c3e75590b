"""Restart bugs of the BLOOM chronicles' kind, planted into the real engines from outside, and a
clean cycle.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "engine")]
from plans import changed, run_folder, small_plan  # noqa: E402
from pool import WorkerPool  # noqa: E402

from trilane.config.training import Dropout  # noqa: E402
from trilane_diagnose.restart import RestartComparison, compare_restart  # noqa: E402


def finalizing() -> Any:
    """megatron-core's module of that name; its package has a function called the same."""
    __import__("megatron.core.distributed")
    return sys.modules["megatron.core.distributed.finalize_model_grads"]


def tied_gradient() -> None:
    """Both ends of the pipeline keep their own gradient of the tied embedding."""
    module = finalizing()
    module._allreduce_word_embedding_grads = lambda *args, **options: None


def norm_reset() -> None:
    """After a load the final norm is what it was before the first step."""
    from trilane_engine.backends.megatron import MegatronStates

    write = MegatronStates.write

    def forgetful(self: Any, number: int, weight: Any, moments: dict[str, Any]) -> None:
        name = self.pieces[number].name
        if name.startswith("decoder.final_layernorm"):
            import torch

            fresh = torch.ones_like if name.endswith("weight") else torch.zeros_like
            weight = fresh(weight)
        write(self, number, weight, moments)

    MegatronStates.write = forgetful


def norm_apart() -> None:
    """Under sequence parallelism each tensor rank keeps its own share of a norm's gradient."""
    module = finalizing()
    module._allreduce_non_tensor_model_parallel_grads = lambda *args, **options: None


def generators_forgotten() -> None:
    from trilane_engine.model import rng as generators

    generators.restore = lambda states: None


@dataclass(frozen=True, kw_only=True)
class Bug:
    """How it is planted, into which engine on which topology, and which finding names it, about
    what and where.
    """

    plant: Callable[[], None]
    kind: str
    tensor: str = ""
    topology: dict[str, Any] = field(default_factory=lambda: {"tp": 2, "pp": 2})
    pp: set[int] = field(default_factory=set)  # stages that must be named; empty: any


BUGS = {
    "tied embedding gradient not reduced": Bug(
        plant=tied_gradient, kind="tied", tensor="embedding.word_embeddings.weight", pp={1}
    ),
    "a norm reset to its defaults on load": Bug(
        plant=norm_reset, kind="reset", tensor="decoder.final_layernorm.weight", pp={1}
    ),
    "LayerNorm out of sync across TP": Bug(
        plant=norm_apart,
        kind="tensor-replicas",
        tensor="layernorm",
        topology={"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "generators not restored": Bug(plant=generators_forgotten, kind="generators"),
}


def named(bug: Bug, audit: RestartComparison) -> bool:
    """Whether a finding names the bug, and no finding is of a kind that it could not
    have led to.
    """
    found = [f for f in audit.findings if f.kind == bug.kind and bug.tensor in f.tensor]
    return any(not bug.pp or {r.pp for r in f.ranks} == bug.pp for f in found)


# Nothing is found in a clean cycle, here with dropout; without, also between engines, see
# engine/test_checkpoint.py.
CLEAN = {"tp": 2, "pp": 2, "dp": 2, "zero": 1}


def cycle(
    home: WorkerPool, folder: Path, settings: dict[str, Any], plant: str = ""
) -> RestartComparison:
    """Two short runs of a small plan with these settings, and a bug where it is named: the second
    loads the first one's first checkpoint.

    At this rate weights change at once, at this limit every gradient is clipped.
    """
    plan = small_plan(folder / "corpus", iters=2, source="mock", **{"mbs": 1, "gbs": 8, **settings})
    plan = changed(plan, "optimizer", lr=1e-3, min_lr=1e-4, warmup_samples=0, clip_grad=0.1)
    plan = replace(plan, dropout=Dropout(hidden=0.1, attention=0.1))
    first = changed(plan, "run", save_interval=1, keep_last=0)
    second = changed(first, "run", load=f"{folder}/first/checkpoints/iter_0000001")
    for name, own in (("first", first), ("second", second)):
        place = run_folder(own, folder / name)
        if plant:
            (place / "plant").write_text(plant)
        problem = home.run(plan.topology.gpus, place)
        assert not problem, problem
    return compare_restart(folder / "first", folder / "second")
