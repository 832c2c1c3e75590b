"""The `hf-zero3` engine: transformers' models under DeepSpeed's ZeRO, made as the Hugging Face
Trainer makes them.

At stage 3 the model is made under zero.Init. The loop, samples, schedule, logs and checkpoints are
those of every engine; so are the optimizer's groups: in the Trainer's, norms and biases would
decay.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import logging

from trilane.config.plan import Plan
from trilane.config.shapes import family_of
from trilane.utils.tables import grouped
from trilane_engine import patches
from trilane_engine.backends.base import Microbatch, Named
from trilane_engine.backends.deepspeed_zero import DeepSpeedStates, DeepSpeedZero
from trilane_engine.checkpoint.huggingface import ours, theirs
from trilane_engine.model.gpt import fill
from trilane_engine.model.parameters import Piece, initial_tensor, whole_sizes


class HfZero3(DeepSpeedZero):
    """ZeRO of one plan."""

    def _initialize(self, ds_config: dict[str, Any]) -> Named:
        plan = self._plan
        family = family_of(plan.shape)
        logging.set_verbosity_error()  # it warns of a loss that it finds by the model's name
        sharded = HfDeepSpeedConfig(ds_config)  # while it exists, transformers heeds it
        model = _model(plan)
        del sharded
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

    def _loss(self, batch: Microbatch) -> Tensor:
        # `shift_labels` are already shifted; without `labels` the model returns no loss
        return self._engine(
            input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels
        ).loss.float()


build = HfZero3


def _model(plan: Plan) -> torch.nn.Module:
    """The model of the plan's shape in its initial state; under stage 3 sharded."""
    shape = plan.shape
    family = family_of(shape)
    given = family.config(shape)
    for name, own in family.dropout.items():
        given[name] = getattr(plan.dropout, own)
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
        # made once, when the first value is asked for: a trace asks for none
        values = functools.cache(functools.partial(_initial, plan, name, size))
        for place, own in enumerate(family.their_names(name)):
            fill(parameters[own], functools.partial(_range_of, values, place))
    return model


def _initial(plan: Plan, name: str, size: tuple[int, ...]) -> list[Tensor]:
    """The initial values of `name` as transformers has them; each rank draws all."""
    return theirs(family_of(plan.shape), name, initial_tensor(name, size, plan), plan.shape)


def _range_of(values: Callable[[], list[Tensor]], place: int, first: int, end: int) -> Tensor:
    """The flat values `first` to `end` of the tensor at this place."""
    return values()[place].reshape(-1)[first:end]


class HfStates:
    """Each piece is made of the parameters that `held` has under its name, gathered over the
    replicas.
    """

    divided = False

    def __init__(self, held: DeepSpeedStates, plan: Plan) -> None:
        self._held = held
        self._shape = plan.shape
        self._family = family_of(plan.shape)
        sizes = whole_sizes(plan.shape)
        numbers = grouped(range(len(held.pieces)), lambda number: held.pieces[number].name)
        self._parts = [numbers[name] for name in sizes]
        self.pieces = [
            Piece(name=name, shape=size, box=tuple((0, n) for n in size))
            for name, size in sizes.items()
        ]
        self.finish_step = held.finish_step
        self.scalars = held.scalars
        self.set_scalars = held.set_scalars

    def shard(self, number: int) -> tuple[int, int]:
        return 0, math.prod(self.pieces[number].size)

    def read(self, number: int, kind: str) -> Tensor:
        parts = [self._held.gathered(part, kind) for part in self._parts[number]]
        name = self.pieces[number].name
        return ours(self._family, name, parts, self._shape).reshape(-1)

    def write(self, number: int, weight: Tensor, moments: dict[str, Tensor]) -> None:
        piece = self.pieces[number]
        weights = theirs(self._family, piece.name, weight, self._shape)
        cut = {
            kind: theirs(self._family, piece.name, values.view(piece.size), self._shape)
            for kind, values in moments.items()
        }
        for place, part in enumerate(self._parts[number]):
            first, end = self._held.shard(part)
            shards = {kind: parts[place].reshape(-1)[first:end] for kind, parts in cut.items()}
            self._held.write(part, weights[place], shards)

    def copy(self, number: int) -> Tensor | None:
        return None  # transformers' tensors are ours under other names

    def decays(self) -> list[float | None]:
        decays = self._held.decays()
        return [decays[parts[0]] for parts in self._parts]
