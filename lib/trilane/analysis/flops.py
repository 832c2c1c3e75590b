"""TFLOPs: the FLOPs of one iteration by our definition, and by those that other frameworks print.

B sequences an iteration of s tokens, L layers, h hidden size, V padded vocabulary, N parameters, t tensor-parallel
size. Each function returns the FLOPs of one iteration of the whole job; rates() divides by seconds and GPUs.
"""

import math
from collections.abc import Callable

from trilane.analysis.run_config import RunConfig
from trilane.config.model import ModelShape
from trilane.logs.run import RunLog


def narayanan(shape: ModelShape, config: RunConfig, batch: float) -> float:
    """Ours: 96 B s L h^2 (1 + s/(6h) + V/(16 L h)) with full recomputation, 72 and 12 in place of 96 and 16 without.

    Narayanan et al. 2021, arXiv:2104.04473, equation 3: what Megatron-DeepSpeed printed from February 2022, the whole
    s x s attention and recomputed work included. Left out: norms, softmax, GELU, selective recomputation, optimizer.
    """
    return shape.flops_per_iteration(batch, config.recompute == "full")


def size_factor(shape: ModelShape, config: RunConfig, batch: float) -> float:
    """Size times factor: 2 N s B, times 4 with full recomputation and 3 without: the BigScience chronicles' tables of
    2021. Embeddings count; left out: the attention core's 4 s h per token and layer, which grows with the sequence.
    """
    passes = 4 if config.recompute == "full" else 3
    return 2 * shape.parameters * passes * batch * shape.seq_length


def replicated(shape: ModelShape, config: RunConfig, batch: float) -> float:
    """The definition of 2021, which grows with tensor parallelism: 8 s B N with N = L (12 h^2 + 13 h + 6 h (t - 1)).

    Megatron-DeepSpeed until February 2022 summed its ranks' parameters, so norms and row-parallel biases (6 h in GPT-2)
    count t times and embeddings not at all; exact on the chronicles' 46 rows of 17 and 20 February. The factor was 4
    whether or not anything was recomputed. Left out: attention core, logits.
    """
    again = 2 * shape.norm_parameters + 2 * shape.hidden_size * (shape.biases == "all")
    each = shape.layer_parameters + again * (config.tp - 1)
    return 8 * batch * shape.seq_length * shape.num_layers * each


def megatron_causal(shape: ModelShape, config: RunConfig, batch: float) -> float:
    """Megatron-LM of 2025 (core 0.16): 72 B s L h^2 (1 + s/(12h) + V/(12 L h)): model FLOPs, attention halved.

    `num_floating_point_operations` of its training.py: half of the scores are masked, and recomputation never counts.
    """
    return shape.flops_per_iteration(batch) - 6.0 * batch * shape.seq_length**2 * shape.num_layers * shape.hidden_size


def hardware(shape: ModelShape, config: RunConfig, batch: float) -> float:
    """What the card executes, for HFU: Narayanan's, and with selective recomputation the attention core once more.

    4 B s^2 L h (Korthikanti et al. 2022, arXiv:2205.05198, section 5). Left out: kernels that skip the masked half.
    """
    again = 4.0 * batch * shape.seq_length**2 * shape.num_layers * shape.hidden_size
    return narayanan(shape, config, batch) + again * (config.recompute == "selective")


Definition = Callable[[ModelShape, RunConfig, float], float]
DEFINITIONS: dict[str, Definition] = {f.__name__: f for f in (narayanan, size_factor, replicated, megatron_causal)}


def rates(config: RunConfig, seconds: float) -> dict[str, float]:
    """FLOP/s per GPU by definition; {} where shape, GPUs, batch or seconds are unknown."""
    shape, batch = config.shape, config.gbs
    if not (shape and config.gpus and batch > 0 and seconds > 0):
        return {}
    return {name: flops(shape, config, batch) / seconds / config.gpus for name, flops in DEFINITIONS.items()}


def utilization(config: RunConfig, seconds: float) -> dict[str, float]:
    """`mfu` and `hfu`: the model's FLOPs, and the hardware's, over the card's peak; {} where one is unknown.

    MFU: Chowdhery et al. 2022, arXiv:2204.02311, appendix B: recomputation does not count, all of the attention does.
    The peak is the data sheet's dense rate in the run's precision; boost clocks and power caps are left out.
    """
    shape, peak = config.shape, config.gpus * config.peak_flops_per_s
    if not (shape and peak and config.gbs > 0 and seconds > 0):
        return {}
    model, executed = shape.flops_per_iteration(config.gbs), hardware(shape, config, config.gbs)
    return {"mfu": model / (seconds * peak), "hfu": executed / (seconds * peak)}


def printed_rates(log: RunLog) -> dict[str, float]:
    """FLOP/s per GPU as the log prints them: `printed`, the median of its lines by its dialect's own definition, and
    `profiler`, DeepSpeed's count of one iteration.
    """
    found, column = {}, log.iterations.get("flops_per_s_per_gpu")
    if column is not None and len(column):
        later = float(column.iloc[1:].median())
        found["printed"] = float(column.median()) if math.isnan(later) else later
    profiled = [v for name, v in log.summary.items() if name.startswith("profiler: fwd+bwd+step") and v > 1e6]
    return found | ({"profiler": profiled[-1]} if profiled else {})
