"""Weights and optimizer of the DeepSpeed engines, piece by piece; each ZeRO stage stores them differently.

Stages 1 and 2, and BF16_Optimizer, lay the parameters of a group end to end and cut that into dp parts; `_hp_mapping`
of a parameter gives the share of it in this rank's part. Stage 3 cuts each parameter separately, stage 0 none.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from megatron.core import parallel_state

from trilane.engine.backends.optimizers import deepspeed_decays, init_moments, set_step, step_of
from trilane.engine.model.parameters import Piece, pieces

# What the optimizer updates: the flat parts of stages 1 and 2, of BF16_Optimizer, of stage 3; else the parameters.
FLAT = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")


class DeepSpeedStates:
    """`named` parameters (whole-model names) in the optimizer that deepspeed.initialize() returned."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], optimizer: Any, stage: int) -> None:
        self.pieces: list[Piece] = pieces(
            named,
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.is_pipeline_first_stage(),
        )
        self._parameters = [parameter for _, parameter in named]
        self._optimizer, self._stage, self._started = optimizer, stage, False
        self.divided = stage > 0

    def finish_step(self) -> None:
        """Nothing to do: DeepSpeed's step leaves every weight up to date."""

    def shard(self, number: int) -> tuple[int, int]:
        """All of the piece in stage 0, else this rank's part of it."""
        parameter: Any = self._parameters[number]
        if self._stage == 0:
            return 0, parameter.numel()
        if self._stage == 3:
            zero = parameter._z3_optimizer
            each, rank = parameter.ds_tensor.ds_numel, zero._get_param_partition_rank(parameter)
            first, end = (min(n * each, parameter.ds_numel) for n in (rank, rank + 1))
            return (first, end) if first < end else (0, 0)
        part = parameter._hp_mapping and parameter._hp_mapping.lp_fragment_address
        return (part.start, part.start + part.numel) if part else (0, 0)

    def read(self, number: int, kind: str) -> torch.Tensor:
        """DeepSpeed's own tensor."""
        self._start()
        parameter: Any = self._parameters[number]
        if self._stage == 0:
            return (parameter if kind == "weight" else self._optimizer.state[parameter][kind]).detach().view(-1)
        if self._stage == 3:
            first, end = self.shard(number)
            return self._held_in_stage_3(parameter, kind).detach().view(-1)[: end - first]
        mapping = parameter._hp_mapping
        if mapping is None:
            return torch.empty(0)
        return mapping.get_hp_fragment(None if kind == "weight" else kind).detach().view(-1)

    def gathered(self, number: int, kind: str) -> torch.Tensor:
        """All of the piece, in its shape, gathered over the replicas; collective."""
        if self._stage == 0:
            return self._to_piece(number, self.read(number, kind))
        self._start()
        parameter = self._parameters[number]
        if kind == "weight":
            found = safe_get_full_fp32_param(parameter)
        else:
            found = safe_get_full_optimizer_state(parameter, kind)
        assert found is not None
        return self._to_piece(number, found)

    def write(self, number: int, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        """The master weight, the moments, and the model's own copy of the weight."""
        parameter: Any = self._parameters[number]
        first, end = self.shard(number)
        with torch.no_grad():
            for kind, values in {"weight": weight.reshape(-1)[first:end], **moments}.items():
                self.read(number, kind).copy_(values)
            # Every replica writes the same values; modifier_rank, a rank among the replicas, decides whose are kept.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._stage == 3):
                parameter.copy_(weight.view(tuple(getattr(parameter, "ds_shape", parameter.shape))))

    def copy(self, number: int) -> torch.Tensor | None:
        """The model's own parameter; None in stage 3, where no rank holds the whole of it, and in stage 0."""
        return None if self._stage in (0, 3) else self._to_piece(number, self._parameters[number].detach())

    def decays(self) -> list[float | None]:
        """Read from DeepSpeed's groups."""
        found = deepspeed_decays(self._optimizer)
        return [found.get(id(parameter)) for parameter in self._parameters]

    def scalars(self) -> dict[str, float]:
        """Adam's step, and in fp16 the loss scale with the counters that decide when it changes."""
        found = {"step": step_of(self._inner())}
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if getattr(scaler, "dynamic", False):
            found["loss_scale"] = float(scaler.cur_scale)
            found["good_steps"] = scaler.cur_iter - scaler.last_overflow_iter - 1
            found["hysteresis"] = scaler.cur_hysteresis
        return found

    def set_scalars(self, values: dict[str, float]) -> None:
        """Set them; the loss scale starts afresh where the checkpoint's precision had none."""
        set_step(self._inner(), values["step"])
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if getattr(scaler, "dynamic", False) and "loss_scale" in values:
            scaler.cur_scale = values["loss_scale"]
            scaler.cur_iter, scaler.last_overflow_iter = int(values["good_steps"]), -1
            scaler.cur_hysteresis = int(values["hysteresis"])

    def _to_piece(self, number: int, held: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's parameter `number` in the piece's layout."""
        return held.view(self.pieces[number].size)

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        yield self._optimizer if self._stage == 0 else self._optimizer.optimizer

    def _start(self) -> None:
        """Create the moments and link DeepSpeed to them.

        DeepSpeed creates them in the first step and then links them to the parameters; in stages 1 and 2 it does so
        when only those of the first group exist (0.19.8), so they are linked again.
        """
        if self._started:
            return
        self._started, optimizer = True, self._optimizer
        for inner in self._inner():
            init_moments(
                inner, next((getattr(optimizer, name) for name in FLAT if hasattr(optimizer, name)), self._parameters)
            )
        if self._stage in (1, 2):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()

    def _held_in_stage_3(self, parameter: Any, kind: str) -> torch.Tensor:
        """This rank's part of the parameter, padded as DeepSpeed has it."""
        held, _ = parameter._z3_optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=None if kind == "weight" else kind
        )
        return held
