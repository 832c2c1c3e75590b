"""The interface of the engines, so that the loop is the same for all of them."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trilane.config.engines import ENGINES
from trilane.config.plan import Plan
from trilane.engine.distributed.world import World
from trilane.engine.model.parameters import States


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Tokens and the tokens that follow them, both (mbs, seq_length), int64, on this rank's device."""

    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of one iteration: mean loss in nats (0 on ranks without it), gradient norm before clipping."""

    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool


class Engine(Protocol):
    """One system that trains the plan's GPT; its module in `backends` has `build(plan, world) -> Engine`."""

    audit: dict[str, str]
    """Every parameter of this rank and its optimizer group, "decay" or "no decay"; checked when the engine is built."""

    path: str
    """Whether its kernels are fused, why, and how attention is computed; for the log's first lines."""

    modules: Sequence[torch.nn.Module]
    """This rank's part of the model, for the profile to find its parts in."""

    settings: dict[str, Any]
    """File name -> JSON of the settings that the library received; written to the run folder."""

    states: States
    """Weights and optimizer, for checkpoints to read and write."""

    @property
    def replica(self) -> tuple[int, int]:
        """(index, number) of this rank's data-parallel replica."""

    def step(self, microbatches: Sequence[Microbatch], lr: float) -> Step:
        """Forward, backward and optimizer step over this replica's share of one global batch."""

    def evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss in nats of one global batch, of which this is the replica's share; 0 on ranks without it.

        Forward alone and without dropout: weights, optimizer and generators stay as they are.
        """


def build(plan: Plan, world: World) -> Engine:
    """The plan's engine with its model in the initial state; collective over all ranks."""
    assert plan.engine in ENGINES
    return importlib.import_module(f"trilane.engine.backends.{plan.engine.replace('-', '_')}").build(plan, world)
