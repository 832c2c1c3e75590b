"""Pieces: which part of which tensor of the whole model this rank holds, and which rank writes it down."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from trilane.engine.model.init import split_dim

Box = tuple[tuple[int, int], ...]  # (first, last + 1) in each dimension of the whole tensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part `box` of parameter `name`, whose whole has `shape`. `spoken_for`: another position writes the same."""

    name: str
    shape: tuple[int, ...]
    box: Box
    spoken_for: bool

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of this part."""
        return tuple(end - first for first, end in self.box)


class States(Protocol):
    """Weights and optimizer of one rank, piece by piece in fp32, whatever the engine makes of them inside.

    A piece is whole over the replicas: where ZeRO or a distributed optimizer cuts it, `read` gathers it, so all
    replicas call with the same numbers in the same order. No more than one tensor is gathered at a time.
    """

    pieces: list[Piece]

    def settle(self) -> None:
        """Finish what the last step put off; all ranks call it together before anybody reads."""

    def read(self, number: int, kind: str) -> torch.Tensor:
        """Piece `number` of that kind (checkpoints.KINDS), in its shape, fp32, on any device."""

    def write(self, number: int, values: dict[str, torch.Tensor]) -> None:
        """Take over piece `number`, all kinds; the weight in the engine's precision follows."""

    def copy(self, number: int) -> torch.Tensor | None:
        """The weight of piece `number` that the model computes with, where this rank holds it whole."""

    def decays(self) -> list[float | None]:
        """The weight decay of each piece's optimizer group now; None where this rank updates none of the piece."""

    def scalars(self) -> dict[str, float]:
        """Adam's step; in fp16 also loss_scale, good_steps since it last changed, and hysteresis."""

    def set_scalars(self, values: dict[str, float]) -> None:
        """Take them over, after the pieces."""


def pieces(named: Iterable[tuple[str, torch.nn.Parameter]], tp_rank: int, tp: int, first_stage: bool) -> list[Piece]:
    """The pieces of parameters by their names in the whole model, in the order given.

    What tensor parallelism leaves whole is written by its ranks in turn; a tied embedding by the first stage.
    """
    found = []
    for number, (name, parameter) in enumerate(named):
        local = tuple(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3 the parameter itself is empty
        dim, twin = split_dim(name), name.startswith("embedding.") and not first_stage
        cut = dim is not None and tp > 1
        box = tuple((n * tp_rank, n * (tp_rank + 1)) if cut and d == dim else (0, n) for d, n in enumerate(local))
        whole = tuple(n * tp if cut and d == dim else n for d, n in enumerate(local))
        found.append(Piece(name=name, shape=whole, box=box, spoken_for=twin or (not cut and number % tp != tp_rank)))
    return found
