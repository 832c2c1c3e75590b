"""A layer of one's own: loaded from the plan, and built as a layer of megatron-core's block.

It is a subclass of megatron-core's TransformerLayer, made as CLASS(config, submodules, layer_number=...), or any module
that is made as CLASS(config, layer_number) and maps (S, B, C) to (S, B, C): S sequence (this rank's part of it), B
microbatch, C hidden size. trial.py tries it out.
"""

import contextlib
import copy
import hashlib
import importlib
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    TransformerLayer,
    get_transformer_layer_offset,
)

from trilane.config.layer import Layer
from trilane.config.plan import Plan
from trilane.engine.model import rng
from trilane.utils.tables import short
from trilane.utils.validation import HostError, shown


class Wrapped(torch.nn.Module):
    """A module (S, B, C) -> (S, B, C) with the interface of megatron-core's layers."""

    def __init__(self, layer: torch.nn.Module, layer_number: int) -> None:
        super().__init__()
        self.layer, self.layer_number = layer, layer_number

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.layer(hidden_states), None


def load(layer: Layer) -> type[torch.nn.Module]:
    """The class that a plan names; ValueError of one line where there is none."""
    where, _, name = layer.name.rpartition(":")
    with refused(layer, "cannot be imported"):
        if layer.source:
            module = sys.modules["trilane_layer"] = types.ModuleType("trilane_layer")
            # so that a traceback shows its lines
            linecache.cache[where] = (len(layer.source), None, layer.source.splitlines(keepends=True), where)
            exec(compile(layer.source, where, "exec"), vars(module))
        else:
            module = importlib.import_module(where)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ValueError(f"layer={layer.name}: {name} is no class of torch.nn.Module there")
    return found


@contextlib.contextmanager
def refused(layer: Layer, what: str) -> Iterator[None]:
    """What the layer's own code raises, as one line of this rank."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = layer.name.rpartition(":")[0]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        # of a cell the lines are counted without those that were left out
        line = f"line {frames[-1].lineno}: {short(frames[-1].line or '')}, " if frames else ""
        raise HostError(f"layer={layer.name}: {what} ({line}{type(error).__name__}: {shown(error)})") from None


def own_spec(plan: Plan, standard: ModuleSpec) -> ModuleSpec:
    """The plan's own layer in place of the `standard` one, whose parts a subclass of megatron-core's layer is given."""
    layer = plan.layer
    assert layer is not None
    kind = load(layer)

    def make(_: type, config: TransformerConfig, layer_number: int, submodules: Any, **groups: Any) -> torch.nn.Module:
        number = layer_number + get_transformer_layer_offset(config, groups.get("vp_stage"))
        before = rng.states()
        # what the class draws itself is the same on every topology
        torch.manual_seed(int(hashlib.sha256(f"{plan.run.seed}/layer {number}".encode()).hexdigest()[:15], 16))
        own, parts = copy.copy(config), copy.deepcopy(submodules)  # it may change both, for this layer alone
        own.perform_initialization = True  # which also marks what megatron-core's linear layers divide
        is_standard = issubclass(kind, TransformerLayer)
        with refused(layer, f"cannot be made by (config, {'submodules, **options' * is_standard or 'layer_number'})"):
            if is_standard:
                made: torch.nn.Module = kind(own, parts, layer_number=layer_number, **groups)
            else:
                made = Wrapped(kind(own, number), number)
        rng.restore(before)
        return made

    # megatron-core builds classes alone; this one's objects are those of make()
    built = type("OwnLayer", (BaseTransformerLayer,), {"__new__": make})
    return ModuleSpec(module=built, submodules=standard.submodules)
