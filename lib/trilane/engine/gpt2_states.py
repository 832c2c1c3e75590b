"""Weights and optimizer of the `hf-zero3` engine: DeepSpeed's, laid out as transformers' GPT-2 and written as ours."""

from collections.abc import Sequence
from typing import Any

import torch

from trilane.engine.deepspeed_states import DeepSpeedStates
from trilane.engine.gpt2_names import canonical_tensor, gpt2_tensor
from trilane.engine.initial import whole_sizes
from trilane.engine.pieces import Piece
from trilane.shape import ModelShape


class Gpt2States(DeepSpeedStates):
    """`named` parameters of GPT2LMHeadModel under our names: Conv1D turned round, qkv by head."""

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], optimizer: Any, stage: int, shape: ModelShape
    ) -> None:
        super().__init__(named, optimizer, stage)
        self._heads, sizes = shape.num_attention_heads, whole_sizes(shape)
        self.pieces = [_whole(name, tuple(sizes[name])) for name, _ in named]

    def _ours(self, number: int, held: torch.Tensor) -> torch.Tensor:
        parameter: Any = self._parameters[number]
        theirs = held.view(tuple(getattr(parameter, "ds_shape", parameter.shape)))
        return canonical_tensor(self.pieces[number].name, theirs, self._heads)

    def _theirs(self, number: int, value: torch.Tensor) -> torch.Tensor:
        return gpt2_tensor(self.pieces[number].name, value, self._heads)


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name=name, shape=shape, box=tuple((0, n) for n in shape), spoken_for=False)
