"""Restart bugs of the BLOOM chronicles' kind, planted into the real engines from outside, and clean cycles without any.

`PYTHONPATH=lib python tests/restart_plants.py [KIND ...]` rehearses all of them and ten clean cycles, and prints a row
each, for docs/restarts.md.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "engine")]
from plans import ELSEWHERE, small_plan  # noqa: E402
from pool import WorkerPool, engine_pool  # noqa: E402

from trilane.diagnose.restart import RestartComparison  # noqa: E402
from trilane.engine.parity import machine  # noqa: E402
from trilane.launch import rehearsal as rehearse  # noqa: E402


def finalizing() -> Any:
    """megatron-core's module of that name; its package has a function called the same."""
    __import__("megatron.core.distributed")
    return sys.modules["megatron.core.distributed.finalize_model_grads"]


def tied_gradient() -> None:
    """Both ends of the pipeline keep their own gradient of the tied embedding."""
    module = finalizing()
    module._allreduce_word_embedding_grads = lambda *args, **options: None


def tied_gradient_3d() -> None:
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    PipelineEngine._INSTRUCTION_MAP[schedule.ReduceTiedGrads] = lambda self: None


def norm_reset() -> None:
    """After a load the final norm is what it was before the first step."""
    from trilane.engine.backends.megatron import MegatronStates

    write = MegatronStates.write

    def forgetful(self: Any, number: int, weight: Any, moments: dict[str, Any]) -> None:
        name = self.pieces[number].name
        if name.startswith("decoder.final_layernorm"):
            import torch

            fresh = torch.ones_like if name.endswith("weight") else torch.zeros_like
            weight = fresh(weight)
        write(self, number, weight, moments)

    MegatronStates.write = forgetful


def norm_decays() -> None:
    """LayerNorm's weights are taken for matrices, as behind document 003's alias; nobody looks."""
    from trilane.engine.backends import base, deepspeed_zero

    deepspeed_zero.must_decay = lambda name: not name.endswith(".bias")
    base.audited = lambda *args: {}


def norm_apart() -> None:
    """Under sequence parallelism each tensor rank keeps its own share of a norm's gradient."""
    module = finalizing()
    module._allreduce_non_tensor_model_parallel_grads = lambda *args, **options: None


def unclipped_stage() -> None:
    """The last stage takes its gradients as they come."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer as module

    clip = module.clip_grad_by_total_norm_fp32

    def clip_but_last(*args: Any, **options: Any) -> None:
        if not parallel_state.is_pipeline_last_stage():
            clip(*args, **options)

    module.clip_grad_by_total_norm_fp32 = clip_but_last


def generators_forgotten() -> None:
    from trilane.engine.model import rng as generators

    generators.restore = lambda states: None


def data_anew() -> None:
    """After a load the samples begin again with the first."""
    from trilane.config.batch_rampup import Batch
    from trilane.engine import loop
    from trilane.engine.checkpoint import load
    from trilane.engine.data.samples import SampleLoader

    original, microbatches = load.load, SampleLoader.microbatches

    def load_and_forget(checkpoint: Any, *args: Any) -> None:
        original(checkpoint, *args)
        gone = checkpoint.manifest["consumed_samples"]

        def anew(self: SampleLoader, batch: Batch) -> Any:
            return microbatches(self, Batch(number=batch.number, first=batch.first - gone, gbs=batch.gbs))

        SampleLoader.microbatches = anew  # type: ignore[method-assign]

    loop.load = load_and_forget


def on_steps_after_a_load(change: Callable[[Any, Any, float], tuple[Any, float]]) -> None:
    """Megatron's engine steps with what `change` makes of engine, microbatches and rate, once it has loaded."""
    from trilane.engine import loop
    from trilane.engine.backends.megatron import Megatron
    from trilane.engine.checkpoint import load

    original, step = load.load, Megatron.step

    def load_and_change(checkpoint: Any, *args: Any) -> None:
        original(checkpoint, *args)
        Megatron.step = lambda self, *given: step(self, *change(self, *given))  # type: ignore[method-assign]

    loop.load = load_and_change


def rate_from_zero() -> None:
    on_steps_after_a_load(lambda engine, microbatches, lr: (microbatches, lr / 50))


def data_replayed() -> None:
    """The first batch again, unlike what the loader announces."""
    from trilane.config.batch_rampup import Batch
    from trilane.engine.data.samples import SampleLoader

    given, original = list[Any](), SampleLoader.microbatches

    def announced(self: SampleLoader, batch: Batch) -> Any:
        given.append(original(self, Batch(number=1, first=0, gbs=batch.gbs)))
        return original(self, batch)

    SampleLoader.microbatches = announced  # type: ignore[method-assign]
    on_steps_after_a_load(lambda engine, microbatches, lr: (given[-1], lr))


def other_beta() -> None:
    """Adam's groups get another beta1 after the load."""

    def change(engine: Any, microbatches: Any, lr: float) -> tuple[Any, float]:
        for group in engine._optimizer.param_groups:
            group["betas"] = (0.5, group["betas"][1])
        return microbatches, lr

    on_steps_after_a_load(change)


def masters_rounded() -> None:
    """A load rebuilds the fp32 master weights from bf16."""
    from trilane.engine.backends.megatron import MegatronStates

    write = MegatronStates.write
    MegatronStates.write = lambda self, number, weight, moments: write(  # type: ignore[method-assign]
        self, number, weight.bfloat16().float(), moments
    )


@dataclass(frozen=True, kw_only=True)
class Bug:
    """How it is planted, into which engine on which topology, and which finding names it, about what and where."""

    plant: Callable[[], None]
    kind: str
    tensor: str = ""
    topology: dict[str, Any] = field(default_factory=lambda: {"tp": 2, "pp": 2})
    pp: set[int] = field(default_factory=set)  # stages that must be named; empty: any


WORD = "embedding.word_embeddings.weight"
PIPE = {"engine": "deepspeed-3d", "tp": 2, "pp": 2, "zero": 1}
BUGS = {
    "tied embedding gradient not reduced": Bug(plant=tied_gradient, kind="tied", tensor=WORD, pp={1}),
    "tied embedding gradient not reduced, 3D": Bug(
        plant=tied_gradient_3d, kind="tied", tensor=WORD, pp={1}, topology=PIPE
    ),
    "a norm reset to its defaults on load": Bug(
        plant=norm_reset, kind="reset", tensor="decoder.final_layernorm.weight", pp={1}
    ),
    "LayerNorm weights decay": Bug(plant=norm_decays, kind="decay", tensor="layernorm.weight", topology=PIPE),
    "LayerNorm out of sync across TP": Bug(
        plant=norm_apart,
        kind="tensor-replicas",
        tensor="layernorm",
        topology={"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "gradient clipping skipped on the last stage": Bug(plant=unclipped_stage, kind="clipping", pp={1}),
    "generators not restored": Bug(plant=generators_forgotten, kind="generators"),
    "data order not restored": Bug(plant=data_anew, kind="data", topology={"dp": 2}),
    "learning rate from zero": Bug(plant=rate_from_zero, kind="rate"),
    "the first samples again": Bug(plant=data_replayed, kind="gradients"),
    "another beta1": Bug(plant=other_beta, kind="moments"),
    "masters rebuilt from bf16": Bug(plant=masters_rounded, kind="masters"),
}


def named(bug: Bug, audit: RestartComparison) -> bool:
    """Whether a finding names the bug, and no finding is of a kind that it could not have led to."""
    found = [f for f in audit.findings if f.kind == bug.kind and bug.tensor in f.tensor]
    return any(not bug.pp or {r.pp for r in f.ranks} == bug.pp for f in found)


# from, to: settings of a plan; clean cycles find nothing
CYCLES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "megatron TP2 PP2 DP2 distributed optimizer": ({"tp": 2, "pp": 2, "dp": 2, "zero": 1}, None),
    "megatron PP2 interleaved bf16": ({"pp": 2, "interleaving": 2, "precision": "bf16"}, None),
    "ZeRO-2 DP2 optimizer offload": ({"engine": "deepspeed-zero", "dp": 2, "zero": 2, "offload": "optimizer"}, None),
    "ZeRO-3 TP2 DP2 fp16": (
        {"engine": "deepspeed-zero", "tp": 2, "dp": 2, "zero": 3, "precision": "fp16"},
        None,
    ),
    "3D TP2 PP2 DP2": ({"engine": "deepspeed-3d", "tp": 2, "pp": 2, "dp": 2, "zero": 1}, None),
    "HF ZeRO-3 DP2 full offload": ({"engine": "hf-zero3", "dp": 2, "zero": 3, "offload": "full"}, None),
    **ELSEWHERE,
    "HF ZeRO-3 DP2 -> megatron TP4": ({"engine": "hf-zero3", "dp": 2, "zero": 3}, {"tp": 4}),
    "megatron DP2 distributed optimizer, both overlaps": (
        {"dp": 2, "zero": 1, "overlap_grad_reduce": True, "overlap_param_gather": True, "precision": "bf16"},
        None,
    ),
}


def asked(data: Path, folder: Path, settings: dict[str, Any]) -> rehearse.Rehearsal:
    """The rehearsal of a small plan with those settings; what both ends of a cycle must share is the batch."""
    plan = small_plan(data, source="mock", **{"mbs": 1, "gbs": 8, **settings})
    made = rehearse.shrink(plan, folder, machine(cards=0, bf16=True), 8)
    return made


def cycle(
    home: WorkerPool, folder: Path, settings: dict[str, Any], other: dict[str, Any] | None, plant: str
) -> RestartComparison:
    """Rehearse with these settings, the second run with `other` where there are any, and a bug where it is named."""
    from dataclasses import replace

    first = asked(folder / "corpus", folder, settings).plan
    second = asked(folder / "corpus", folder, settings if other is None else other).plan
    if other is not None:  # one model and batch, that of neither topology alone
        wide = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
        shape = replace(first.shape, **wide)
        first, second = (
            replace(p, shape=shape, topology=replace(p.topology, gbs=8), dropout=small_plan(folder).dropout)
            for p in (first, second)
        )

    def start(place: Path) -> str:
        if plant:
            (place / "plant").write_text(plant)
        plan = json.loads((place / "plan.json").read_text())
        if place.name == "second":
            plan = {**second.to_json(), "run": plan["run"]}
            (place / "plan.json").write_text(json.dumps(plan))
        t = plan["topology"]
        return home.run(t["tp"] * t["pp"] * t["dp"], place)

    done = rehearse.rehearse(rehearse.Rehearsal(plan=first, notes=()), folder, start)
    assert done.audit, done.problem
    return done.audit


def main(kinds: list[str]) -> None:
    """A row for each bug and each clean cycle."""
    with engine_pool() as home, tempfile.TemporaryDirectory() as place:
        for number, kind in enumerate(kinds or [*BUGS, *CYCLES]):
            bug = BUGS.get(kind)
            settings, other = (bug.topology, None) if bug else CYCLES[kind]
            found = cycle(home, Path(place) / str(number), settings, other, kind if bug else "")
            right = named(bug, found) if bug else not found.findings
            print(f"| {kind} | {len(found.findings)} | {'yes' if right else 'NO'} |", flush=True)
            if kinds or not right:
                print(*(f"    {f.line()}" for f in found.findings), *found.notes, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
