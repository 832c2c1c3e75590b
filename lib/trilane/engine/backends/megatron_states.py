"""Weights and optimizer of the `megatron` engine, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from trilane.engine.backends.optimizers import init_moments, set_step, step_of, weight_decays
from trilane.engine.model.parameters import Piece, pieces


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """This rank's share of a parameter in its optimizer: `main` holds the values `first` to `end`, flattened."""

    optimizer: torch.optim.Optimizer
    main: torch.Tensor
    first: int
    end: int

    def held(self, kind: str) -> torch.Tensor:
        """The values that this rank updates, flat."""
        return (self.main if kind == "weight" else self.optimizer.state[self.main][kind]).detach().view(-1)


class MegatronStates:
    """`named` parameters (whole-model names) of DDP `chunks` in megatron-core's chained optimizers."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[Any],
        chunks: Sequence[DistributedDataParallel],
    ) -> None:
        self.pieces: list[Piece] = pieces(
            named,
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        )
        self._parameters = [parameter for _, parameter in named]
        self._optimizers, self._chunks = optimizers, chunks
        self.divided = any(hasattr(optimizer, "model_param_group_index_map") for optimizer in optimizers)

    def finish_step(self) -> None:
        """Gather the new weights now: with overlap_param_gather a replica gets the others' in its next forward pass."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def shard(self, number: int) -> tuple[int, int]:
        """All of the piece, or with the distributed optimizer this rank's range of it."""
        shard = self._shard(number)
        return (shard.first, shard.end) if shard else (0, 0)

    def read(self, number: int, kind: str) -> torch.Tensor:
        """The optimizer's own tensor."""
        self._start()
        shard = self._shard(number)
        return shard.held(kind) if shard else torch.empty(0)

    def write(self, number: int, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        """The master weight, the moments, and the model's own copy of the weight."""
        first, end = self.shard(number)
        with torch.no_grad():
            self._parameters[number].copy_(weight.view_as(self._parameters[number]))
            for kind, values in {"weight": weight.reshape(-1)[first:end], **moments}.items():
                self.read(number, kind).copy_(values)

    def copy(self, number: int) -> torch.Tensor | None:
        """The model's own parameter, where the optimizer has another or only a part of it."""
        parameter, shard = self._parameters[number], self._shard(number)
        if not self.divided and shard and shard.main is parameter:
            return None
        return parameter.detach().view(self.pieces[number].size)

    def decays(self) -> list[float | None]:
        """Read from megatron-core's groups."""
        return [next(weight_decays(parameter, self._optimizers), None) for parameter in self._parameters]

    def scalars(self) -> dict[str, float]:
        """Adam's step, and in fp16 the loss scale with the counters that decide when it changes."""
        found = {"step": step_of(self._inner())}
        scaler: Any = getattr(self._optimizers[0], "grad_scaler", None)
        if hasattr(scaler, "growth_interval"):
            found["loss_scale"] = scaler.scale.item()
            found["good_steps"], found["hysteresis"] = scaler._growth_tracker, scaler._hysteresis_tracker
        return found

    def set_scalars(self, values: dict[str, float]) -> None:
        """Set them; the loss scale starts afresh where the checkpoint's precision had none."""
        set_step(self._inner(), values["step"])
        for optimizer in self._optimizers:
            scaler: Any = getattr(optimizer, "grad_scaler", None)
            if hasattr(scaler, "growth_interval") and "loss_scale" in values:
                scaler._scale.fill_(values["loss_scale"])
                scaler._growth_tracker = int(values["good_steps"]) % scaler.growth_interval
                scaler._hysteresis_tracker = int(values["hysteresis"])

    def _start(self) -> None:
        """Create the moments, which do not exist before the first step that fp16 did not skip."""
        for inner in self._inner():
            init_moments(inner, (parameter for group in inner.param_groups for parameter in group["params"]))

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer.optimizer for optimizer in self._optimizers)

    def _shard(self, number: int) -> OptimizerShard | None:
        """The parameter's shard on this rank; None where other replicas update all of it."""
        parameter = self._parameters[number]
        for optimizer in self._optimizers:
            if hasattr(optimizer, "model_param_group_index_map"):  # the distributed optimizer
                place = optimizer.model_param_group_index_map.get(parameter)
                if place is None:
                    continue
                main = optimizer.optimizer.param_groups[place[0]]["params"][place[1]]
                part = optimizer._get_model_param_range_map(parameter)["param"]
                return OptimizerShard(optimizer=optimizer.optimizer, main=main, first=part.start, end=part.end)
            main = getattr(parameter, "main_param", parameter)
            if any(main is other for group in optimizer.optimizer.param_groups for other in group["params"]):
                return OptimizerShard(optimizer=optimizer.optimizer, main=main, first=0, end=parameter.numel())
        return None
