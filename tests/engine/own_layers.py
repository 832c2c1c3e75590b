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
    """An MLP that megatron-core's linear layers divide."""

    def __init__(self, config, layer_number):
        super().__init__()
        options = {"config": config, "init_method": config.init_method, "bias": False}
        options["skip_bias_add"] = False
        self.norm = torch.nn.RMSNorm(config.hidden_size)
        self.up = ColumnParallelLinear(config.hidden_size, 256, **options)
        self.down = RowParallelLinear(256, config.hidden_size, input_is_parallel=True, **options)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))[0]))[0]


class Averages(torch.nn.Module):
    """Of plain torch: a running mean over the sequence, and an MLP with its own random initial
    values.
    """

    def __init__(self, config, layer_number):
        super().__init__()
        self.norm = torch.nn.RMSNorm(config.hidden_size)
        self.up = torch.nn.Linear(config.hidden_size, 256)
        self.down = torch.nn.Linear(256, config.hidden_size)

    def forward(self, x):
        mean = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None]
        return x + self.down(F.relu(self.up(self.norm(x + mean))))
