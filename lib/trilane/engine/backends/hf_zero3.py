"""The `hf-zero3` engine: transformers' models under DeepSpeed's ZeRO, driven through the Hugging Face Trainer.

Used of the Trainer: TrainingArguments with our DeepSpeed JSON (which it checks against them), the model made under
zero.Init at stage 3, accelerate's call of deepspeed.initialize, and training_step for each microbatch. Not used: its
loop, sampler, schedule, logging and checkpoints, which are the same for every engine, and its optimizer groups, in
which norms and biases would decay.
"""

import contextlib
import logging
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from accelerate.utils import DummyOptim
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from trilane.config.hf_families import family_of
from trilane.config.plan import Plan
from trilane.engine.backends.base import Microbatch, Named
from trilane.engine.backends.deepspeed_zero import DeepSpeed, DeepSpeedStates, groups
from trilane.engine.checkpoint.huggingface import ours, theirs
from trilane.engine.model.parameters import Piece, initial_tensor, whole_sizes
from trilane.engine.model.rng import seed_streams


class HfZero3(DeepSpeed):
    """ZeRO of one plan."""

    def _initialize(self, ds_config: dict[str, Any]) -> Named:
        plan, o = self._plan, self._plan.optimizer
        # It warns that the number of microbatches is given both to the Trainer and in DeepSpeed's JSON.
        logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
        arguments = trainer_arguments(plan, ds_config)
        model = _model(plan)
        parameters, family = dict(model.named_parameters()), family_of(plan.shape)
        names = {own: name for name in whole_sizes(plan.shape) for own in family.their_names(name)}
        assert parameters.keys() == names.keys()
        named = [(name, parameters[own]) for own, name in names.items()]
        self._trainer = Trainer(model=model, args=arguments)
        arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, plan.run.train_iters)
        # DummyOptim makes accelerate build the optimizer of the JSON over these groups.
        optimizer = DummyOptim(groups(named, o.weight_decay), lr=o.lr, weight_decay=o.weight_decay)
        self._engine, _ = self._trainer.accelerator.prepare(model, optimizer)
        self.modules = [model]
        self._mark_phases()
        seed_streams(plan.run.seed)  # again: the Trainer gave every rank the same seed
        return named

    def _build(self) -> None:
        super()._build()
        assert isinstance(self.states, DeepSpeedStates)
        self.states = HfStates(self.states, self._plan)

    def _train(self, microbatches: Sequence[Microbatch]) -> float:
        trainer, count, losses = self._trainer, len(microbatches), []
        trainer.current_gradient_accumulation_steps = count
        for number, batch in enumerate(microbatches, 1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == count)
            losses.append(trainer.training_step(self._engine, _inputs(batch)))  # divided by `count`
        return self._mean([torch.stack(losses).sum()])

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        loss_of: Any = self._trainer.compute_loss
        return self._mean([loss_of(self._engine, _inputs(batch)).float() for batch in microbatches])


build = HfZero3


def _inputs(batch: Microbatch) -> dict[str, torch.Tensor]:
    # `shift_labels` are already shifted; without `labels` the model returns no loss
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
    shape, family = plan.shape, family_of(plan.shape)
    given = family.config(shape) | {theirs: getattr(plan.dropout, o) for theirs, o in family.dropout.items()}
    del given["torch_dtype"]  # that of the plan is DeepSpeed's
    config = AutoConfig.for_model(**given, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    if plan.topology.recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    parameters = dict(model.named_parameters())
    for name, size in whole_sizes(shape).items():
        whole = initial_tensor(name, size, plan)
        for own, value in zip(family.their_names(name), theirs(family, name, whole, shape), strict=True):
            with torch.no_grad(), contextlib.ExitStack() as stack:
                if hasattr(parameters[own], "ds_id"):
                    stack.enter_context(deepspeed.zero.GatheredParameters([parameters[own]], modifier_rank=0))
                parameters[own].copy_(value)
    return model


class HfStates:
    """Each piece is made of the parameters that `held` has under its name, gathered over the replicas."""

    divided = False

    def __init__(self, held: DeepSpeedStates, plan: Plan) -> None:
        self._held, self._shape, self._family = held, plan.shape, family_of(plan.shape)
        sizes = whole_sizes(plan.shape)
        self._parts = [[n for n, piece in enumerate(held.pieces) if piece.name == name] for name in sizes]
        self.pieces = [Piece(name=name, shape=s, box=tuple((0, n) for n in s)) for name, s in sizes.items()]
        self.finish_step, self.scalars, self.set_scalars = held.finish_step, held.scalars, held.set_scalars

    def shard(self, number: int) -> tuple[int, int]:
        return 0, math.prod(self.pieces[number].size)

    def read(self, number: int, kind: str) -> torch.Tensor:
        return self._joined(number, [self._held.gathered(part, kind) for part in self._parts[number]]).reshape(-1)

    def write(self, number: int, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        name, size = self.pieces[number].name, self.pieces[number].size
        weights = theirs(self._family, name, weight, self._shape)
        cut = {k: theirs(self._family, name, v.view(size), self._shape) for k, v in moments.items()}
        for place, part in enumerate(self._parts[number]):
            first, end = self._held.shard(part)
            shards = {kind: parts[place].reshape(-1)[first:end] for kind, parts in cut.items()}
            self._held.write(part, weights[place], shards)

    def copy(self, number: int) -> torch.Tensor | None:
        parts = [self._held.copy(part) for part in self._parts[number]]
        return self._joined(number, [part for part in parts if part is not None]) if parts[0] is not None else None

    def decays(self) -> list[float | None]:
        found = self._held.decays()
        return [found[parts[0]] for parts in self._parts]

    def _joined(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return ours(self._family, self.pieces[number].name, parts, self._shape)
