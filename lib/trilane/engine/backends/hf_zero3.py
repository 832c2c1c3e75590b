"""The `hf-zero3` engine: transformers' models under DeepSpeed's ZeRO, driven through the Hugging Face Trainer.

Used of the Trainer: TrainingArguments with our DeepSpeed JSON (which it checks against them), the model made under
zero.Init at stage 3, accelerate's call of deepspeed.initialize, and training_step for each microbatch: inputs, loss,
gradient accumulation, backward and, after the last microbatch, DeepSpeed's step. Not used: its loop, sampler, schedule,
logging and checkpoints, which are the same for every engine, and its optimizer groups: with the optimizer in the JSON
norms and biases would decay.
"""

import logging
import math
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
import torch._dynamo  # its first import fails inside zero.Init, which replaces Tensor.__new__
import torch.distributed as dist
from accelerate.utils import DummyOptim
from megatron.core import parallel_state
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from trilane.config.hf_families import family_of
from trilane.config.model import ModelShape
from trilane.config.plan import Plan
from trilane.engine.backends.deepspeed_common import (
    CONFIG,
    WholeClipping,
    begin_step,
    groups,
    loss_scale,
    mark_phases,
    quiet,
    settings,
    start,
    step_of,
)
from trilane.engine.backends.deepspeed_states import DeepSpeedStates
from trilane.engine.backends.optimizers import deepspeed_audit
from trilane.engine.checkpoint.hf_names import canonical_names, ours, theirs
from trilane.engine.distributed.world import World
from trilane.engine.interface import Microbatch, Step
from trilane.engine.model import fused_path
from trilane.engine.model.initial import initial_tensor
from trilane.engine.model.parameters import Piece, whole_sizes
from trilane.engine.model.rng import seed_streams


def build(plan: Plan, world: World) -> "HfZero3":
    """The engine; collective over all ranks."""
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    start()
    # It warns that the number of microbatches is given both to the Trainer and in DeepSpeed's JSON.
    logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
    return HfZero3(plan, world)


class HfZero3:
    """ZeRO of one plan; `step` runs one iteration, collectively."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        self.path = str(fused_path.choose(plan, world))
        ds_config = settings(plan)
        self.settings: dict[str, Any] = {CONFIG: ds_config}
        decay = plan.optimizer.weight_decay
        with quiet():
            arguments = trainer_arguments(plan, ds_config)
            model = _model(plan)
            named = _named(model, plan.shape)
            self._trainer = Trainer(model=model, args=arguments)
            arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, plan.run.train_iters)
            # DummyOptim makes accelerate build the optimizer of the JSON over these groups.
            optimizer = DummyOptim(groups(named, decay), lr=plan.optimizer.lr, weight_decay=decay)
            self._engine, _ = self._trainer.accelerator.prepare(model, optimizer)
        self.modules = [model]
        mark_phases(self._engine)
        self.audit = deepspeed_audit(named, self._engine.optimizer, decay)
        self.states = HfStates(named, self._engine.optimizer, plan.topology.zero, plan.shape)
        self._clipping = WholeClipping(self._engine, plan) if plan.topology.zero == 0 else None
        seed_streams(plan.run.seed)  # after the Trainer, which gives every rank the same seed

    @property
    def replica(self) -> tuple[int, int]:
        """Data-parallel rank and size."""
        return dist.get_rank(), dist.get_world_size()

    def step(self, microbatches: Sequence[Microbatch], lr: float) -> Step:
        """One iteration: the Trainer's training step for each microbatch, DeepSpeed's own after the last of them."""
        begin_step(self._engine, lr, len(microbatches))
        scale = loss_scale(self._engine, self._plan)
        trainer, losses = self._trainer, []
        trainer.current_gradient_accumulation_steps = len(microbatches)
        for number, batch in enumerate(microbatches, 1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == len(microbatches))
            losses.append(trainer.training_step(self._engine, _inputs(batch)))  # divided by the number of microbatches
        norm = self._clipping.norm if self._clipping else None
        return step_of(self._engine, _mean(torch.stack(losses).sum()), scale, norm)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss of one batch, as the Trainer computes it in its training step."""
        loss_of: Any = self._trainer.compute_loss
        self._engine.eval()
        with torch.no_grad():
            losses = [loss_of(self._engine, _inputs(batch)).float() for batch in microbatches]
        self._engine.train()
        return _mean(torch.stack(losses).mean())


def _inputs(batch: Microbatch) -> dict[str, torch.Tensor]:
    """What the model takes: `shift_labels` are already shifted; without `labels` it returns no loss."""
    return {"input_ids": batch.tokens, "labels": batch.labels, "shift_labels": batch.labels}


def trainer_arguments(plan: Plan, ds_config: dict[str, Any]) -> TrainingArguments:
    """The plan as TrainingArguments. Nothing is written to `output_dir`, which must exist."""
    o, t = plan.optimizer, plan.topology
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=plan.run.train_iters,
        per_device_train_batch_size=t.mbs,
        gradient_accumulation_steps=t.microbatches,
        learning_rate=o.lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_epsilon=o.adam_eps,
        max_grad_norm=o.clip_grad,
        bf16=t.precision == "bf16",
        fp16=t.precision == "fp16",
        use_cpu=not torch.cuda.is_available(),
        seed=plan.run.seed,
        deepspeed=ds_config,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


def _model(plan: Plan) -> torch.nn.Module:
    """The model of the plan's shape in its initial state; under stage 3 the Trainer's arguments make it sharded."""
    family = family_of(plan.shape)
    given = family.config(plan.shape) | {theirs: getattr(plan.dropout, o) for theirs, o in family.dropout.items()}
    del given["torch_dtype"]  # that of the plan is DeepSpeed's
    config = AutoConfig.for_model(**given, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    if plan.topology.recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    _fill(model, plan)
    return model


def _fill(model: torch.nn.Module, plan: Plan) -> None:
    """Set every parameter to its initial tensor in the family's layout."""
    shape, family = plan.shape, family_of(plan.shape)
    parameters = dict(model.named_parameters())
    for name, size in whole_sizes(shape).items():
        whole = initial_tensor(name, size, plan)
        for part, value in zip(family.their_names(name), theirs(family, name, whole, shape), strict=True):
            cut = hasattr(parameters[part], "ds_id")
            gathered = deepspeed.zero.GatheredParameters([parameters[part]], modifier_rank=0) if cut else nullcontext()
            with torch.no_grad(), gathered:
                parameters[part].copy_(value)


def _named(model: torch.nn.Module, shape: ModelShape) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters by canonical name: those of one name, such as queries, keys and values, in the table's order."""
    parameters, names = dict(model.named_parameters()), canonical_names(family_of(shape), shape)
    assert parameters.keys() == names.keys()
    return [(names[name], parameters[name]) for name in names]


def _mean(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


class HfStates:
    """Weights and optimizer under our names: each piece is made of the parameters `named` by it, in that order."""

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], optimizer: Any, stage: int, shape: ModelShape
    ) -> None:
        self._held = DeepSpeedStates(named, optimizer, stage)
        self._shape, self._family = shape, family_of(shape)
        self._parts = [[n for n, (other, _) in enumerate(named) if other == name] for name in whole_sizes(shape)]
        self.pieces = [_whole(name, size) for name, size in whole_sizes(shape).items()]
        self.divided = False  # what ZeRO divides is their layout, in which a range is no part of ours

    def finish_step(self) -> None:
        """Nothing to do."""

    def shard(self, number: int) -> tuple[int, int]:
        """All of the piece."""
        return 0, math.prod(self.pieces[number].size)

    def read(self, number: int, kind: str) -> torch.Tensor:
        """The piece; DeepSpeed gathers its parameters over the replicas."""
        return self._joined(number, [self._held.gathered(part, kind) for part in self._parts[number]]).reshape(-1)

    def write(self, number: int, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        """Set the piece's parameters."""
        piece = self.pieces[number]
        weights = theirs(self._family, piece.name, weight, self._shape)
        cut = {k: theirs(self._family, piece.name, v.view(piece.size), self._shape) for k, v in moments.items()}
        for place, part in enumerate(self._parts[number]):
            first, end = self._held.shard(part)
            shards = {kind: parts[place].reshape(-1)[first:end] for kind, parts in cut.items()}
            self._held.write(part, weights[place], shards)

    def copy(self, number: int) -> torch.Tensor | None:
        """The model's own parameters; None in stage 3."""
        parts = [self._held.copy(part) for part in self._parts[number]]
        return self._joined(number, [part for part in parts if part is not None]) if parts[0] is not None else None

    def decays(self) -> list[float | None]:
        """Read from DeepSpeed's groups."""
        found = self._held.decays()
        return [found[parts[0]] for parts in self._parts]

    def scalars(self) -> dict[str, float]:
        """Those of DeepSpeedStates."""
        return self._held.scalars()

    def set_scalars(self, values: dict[str, float]) -> None:
        """Set them."""
        self._held.set_scalars(values)

    def _joined(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return ours(self._family, self.pieces[number].name, parts, self._shape)


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name=name, shape=shape, box=tuple((0, n) for n in shape), written_elsewhere=False)
