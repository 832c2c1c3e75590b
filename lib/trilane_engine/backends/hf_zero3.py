"""The `hf-zero3` engine: transformers' models under DeepSpeed's ZeRO, made as the Hugging Face
Trainer makes them.

At stage 3 the model is made under zero.Init. The loop, samples, schedule, logs and checkpoints are
those of every engine; so are the optimizer's groups: in the Trainer's, norms and biases would
decay.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import logging

from trilane.config.plan import Plan
from trilane.config.shapes import Family, family_of
from trilane_engine import patches
from trilane_engine.backends.base import Microbatch, Named
from trilane_engine.backends.deepspeed_zero import DeepSpeedStates, DeepSpeedZero
from trilane_engine.checkpoint.huggingface import is_turned, ours, theirs
from trilane_engine.model.gpt import fill
from trilane_engine.model.parameters import (
    Piece,
    initial_block,
    initial_range,
    split_dim,
    whole_sizes,
)


class HfZero3(DeepSpeedZero):
    """ZeRO of one plan."""

    def _initialize(self, ds_config: dict[str, Any]) -> Named:
        plan, family = self._plan, family_of(self._plan.shape)
        logging.set_verbosity_error()  # it warns of a loss that it finds by the model's name
        made_sharded = HfDeepSpeedConfig(ds_config)  # while it exists, transformers heeds it
        model = _model(plan)
        del made_sharded
        parameters = dict(model.named_parameters())
        names = {own: name for name in whole_sizes(plan.shape) for own in family.their_names(name)}
        assert parameters.keys() == names.keys()
        named = [(name, parameters[own]) for own, name in names.items()]
        self._wrap(model, named, ds_config)
        self._mark_phases()
        return named

    def _build(self) -> None:
        super()._build()
        assert isinstance(self.states, DeepSpeedStates)
        self.states = HfStates(self.states, self._plan)

    def _loss(self, batch: Microbatch) -> torch.Tensor:
        # `shift_labels` are already shifted; without `labels` the model returns no loss
        return self._engine(
            input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels
        ).loss.float()


build = HfZero3


def _model(plan: Plan) -> torch.nn.Module:
    """The model of the plan's shape in its initial state; under stage 3 sharded."""
    shape, family = plan.shape, family_of(plan.shape)
    given = family.config(shape) | {
        theirs: getattr(plan.dropout, o) for theirs, o in family.dropout.items()
    }
    del given["torch_dtype"]  # that of the plan is DeepSpeed's
    kernel = "eager" if plan.topology.attention == "scores" else "sdpa"
    config = AutoConfig.for_model(**given, use_cache=False, bos_token_id=0, eos_token_id=0)
    # neither draws a value that ours would replace; under ZeRO-3 transformers would gather each
    # module for it
    patches.without_initial_values()
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    model.tie_weights()
    if plan.topology.recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    parameters = dict(model.named_parameters())
    for name, size in whole_sizes(shape).items():
        # their tensors as the numbers of the canonical rows in them; vectors are 0 or 1 throughout
        numbers = torch.arange(math.prod(size[:-1])).view(*size[:-1], 1)
        names = family.their_names(name)
        rows = (
            theirs(family, name, numbers, shape) if len(size) > 1 else [torch.empty(0)] * len(names)
        )
        for own, those in zip(names, rows, strict=True):
            fill(
                parameters[own],
                functools.partial(_drawn, family, name, those.flatten().numpy(), size[-1], plan),
            )
    return model


def _drawn(
    family: Family, name: str, rows: np.ndarray, width: int, plan: Plan, first: int, end: int
) -> torch.Tensor:
    """The flat values `first` to `end` of the tensor of transformers that has these rows of the
    matrix `name`.
    """
    if not len(rows):
        return initial_range(name, (width,), 0, 1, plan, first, end)
    turned, dim = is_turned(family, name), split_dim(name)
    each = len(rows) if turned else width  # values in a row of theirs
    top, last = first // each, -(-end // each)
    if turned:
        drawn = initial_block(name, rows, (top, last), width, plan, dim).t()
    else:
        drawn = initial_block(name, rows[top:last], (0, width), width, plan, dim)
    return drawn.reshape(-1)[first - top * each : end - top * each]


class HfStates:
    """Each piece is made of the parameters that `held` has under its name, gathered over the
    replicas.
    """

    divided = False

    def __init__(self, held: DeepSpeedStates, plan: Plan) -> None:
        self._held, self._shape, self._family = held, plan.shape, family_of(plan.shape)
        sizes = whole_sizes(plan.shape)
        self._parts = [
            [n for n, piece in enumerate(held.pieces) if piece.name == name] for name in sizes
        ]
        self.pieces = [
            Piece(name=name, shape=s, box=tuple((0, n) for n in s)) for name, s in sizes.items()
        ]
        self.finish_step, self.scalars, self.set_scalars = (
            held.finish_step,
            held.scalars,
            held.set_scalars,
        )

    def shard(self, number: int) -> tuple[int, int]:
        return 0, math.prod(self.pieces[number].size)

    def read(self, number: int, kind: str) -> torch.Tensor:
        return self._joined(
            number, [self._held.gathered(part, kind) for part in self._parts[number]]
        ).reshape(-1)

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
        return (
            self._joined(number, [part for part in parts if part is not None])
            if parts[0] is not None
            else None
        )

    def decays(self) -> list[float | None]:
        found = self._held.decays()
        return [found[parts[0]] for parts in self._parts]

    def _joined(self, number: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return ours(self._family, self.pieces[number].name, parts, self._shape)
