"""Restart bugs of the BLOOM chronicles' kind, planted into the real engines from outside, and a
clean cycle.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "engine")]
from parity import machine  # noqa: E402
from plans import small_plan  # noqa: E402
from pool import WorkerPool  # noqa: E402

from trilane_diagnose import rehearsal as rehearse  # noqa: E402
from trilane_diagnose.restart import RestartComparison  # noqa: E402


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
    """Rehearse a small plan with these settings, and a bug where it is named."""
    plan = small_plan(folder / "corpus", source="mock", **{"mbs": 1, "gbs": 8, **settings})

    def start(place: Path) -> str:
        if plant:
            (place / "plant").write_text(plant)
        return home.run(tiny.topology.gpus, place)

    tiny = rehearse.shrink(plan, folder, machine(cards=0, bf16=True), 8)
    done = rehearse.rehearse(tiny, folder, start)
    assert done.audit, done.problem
    return done.audit
