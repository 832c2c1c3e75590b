"""Layers of a researcher's own, as she would write them in one file."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer


class QKNorm(TransformerLayer):
    """Norms of the queries and keys of each head, and squared ReLU: megatron-core's parts, two of
    them replaced.
    """

    def __init__(self, config, submodules, **options):
        attention = submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = submodules.input_layernorm
        config.activation_func, config.qk_layernorm = squared_relu, True
        super().__init__(config, submodules, **options)


def squared_relu(x):
    return F.relu(x).square()


class Mixer(torch.nn.Module):
    """An MLP that megatron-core's linear layers divide, with a gate of 64 channels that every rank
    holds whole, and whose gradient is a part on each; `close` is 0 at first, so that the first
    gradient of all before it is 0.
    """

    def __init__(self, config, layer_number):
        super().__init__()
        own = {"config": config, "init_method": config.init_method, "bias": False}
        self.norm = torch.nn.RMSNorm(config.hidden_size)
        self.up = ColumnParallelLinear(config.hidden_size, 256, **own)
        self.gate = torch.nn.Parameter(torch.ones(64))
        self.down = RowParallelLinear(
            256, config.hidden_size, input_is_parallel=True, skip_bias_add=False, **own
        )
        self.close = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x):
        inner = self.up(self.norm(x))[0].unflatten(-1, (-1, 64)) * self.gate
        return x + self.close * self.down(F.relu(inner.flatten(-2)))[0]


class Averages(torch.nn.Module):
    """Of plain torch: a running mean over the sequence, and an MLP with its own random initial
    values.
    """

    def __init__(self, config, layer_number):
        super().__init__()
        self.norm = torch.nn.RMSNorm(config.hidden_size)
        self.up, self.down = (
            torch.nn.Linear(config.hidden_size, 256),
            torch.nn.Linear(256, config.hidden_size),
        )

    def forward(self, x):
        mean = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None]
        return x + self.down(F.relu(self.up(self.norm(x + mean))))
