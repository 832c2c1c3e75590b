"""TFLOPs: the FLOPs of one iteration by our definition, and by those that other frameworks print."""

import numpy as np

from trilane.analysis.run_config import RunConfig
from trilane.config.model import ModelShape
from trilane.logs.run import RunLog


def iteration_flops(shape: ModelShape, batch: float, tp: int = 1, recompute: str = "none") -> dict[str, float]:
    """FLOPs of one iteration of the whole job, by definition.

    B sequences of s tokens, L layers, h hidden size, V padded vocabulary, N parameters, t tensor-parallel size:

        narayanan        96 B s L h^2 (1 + s/(6h) + V/(16 L h)) with full recomputation, 72 and 12 for 96 and 16 without
        size_factor      2 N s B, times 4 with full recomputation and 3 without
        replicated       8 s B L (12 h^2 + 13 h + 6 h (t - 1)), whether or not anything is recomputed
        megatron_causal  72 B s L h^2 (1 + s/(12h) + V/(12 L h)): half of the scores are masked, nothing is recomputed

    The first is ours: Narayanan et al. 2021, arXiv:2104.04473, equation 3, which Megatron-DeepSpeed printed from
    February 2022 on. The second is of the BigScience chronicles' tables of 2021; it leaves out the attention core. The
    third was printed before: its ranks' parameters were summed, so that norms and row-parallel biases (6 h in GPT-2)
    count t times and embeddings never; exact on the chronicles' 46 rows of 17 and 20 February. The last is
    `num_floating_point_operations` in training.py of Megatron-LM 2025 (core 0.16). Left out by all: norms, softmax,
    GELU, optimizer.
    """
    s, L, h = shape.seq_length, shape.num_layers, shape.hidden_size
    again = 2 * shape.norm_parameters + 2 * h * (shape.biases == "all")
    return {
        "narayanan": shape.flops_per_iteration(batch, recompute == "full"),
        "size_factor": 2.0 * shape.parameters * (4 if recompute == "full" else 3) * batch * s,
        "replicated": 8.0 * batch * s * L * (shape.layer_parameters + again * (tp - 1)),
        "megatron_causal": shape.flops_per_iteration(batch) - 6.0 * batch * s**2 * L * h,
    }


def rates(config: RunConfig, seconds: float) -> dict[str, float]:
    """FLOP/s per GPU by definition; {} where shape, GPUs, batch or seconds are unknown."""
    shape, batch = config.shape, config.gbs
    if not (shape and config.gpus and batch > 0 and seconds > 0):
        return {}
    found = iteration_flops(shape, batch, config.tp, config.recompute)
    return {name: flops / seconds / config.gpus for name, flops in found.items()}


def utilization(config: RunConfig, seconds: float) -> dict[str, float]:
    """`mfu` and `hfu`: the model's FLOPs, and the hardware's, over the card's peak; {} where one is unknown.

    MFU: Chowdhery et al. 2022, arXiv:2204.02311, appendix B: recomputation does not count, all of the attention does.
    HFU counts it: with selective recomputation the attention core once more, 4 B s^2 L h (Korthikanti et al. 2022,
    arXiv:2205.05198, section 5). The peak is the data sheet's dense rate in the run's precision. Left out: kernels that
    skip the masked half, boost clocks and power caps.
    """
    shape, peak = config.shape, config.gpus * config.peak_flops_per_s
    if not (shape and peak and config.gbs > 0 and seconds > 0):
        return {}
    core = 4.0 * config.gbs * shape.seq_length**2 * shape.num_layers * shape.hidden_size
    executed = shape.flops_per_iteration(config.gbs, config.recompute == "full")
    executed += core * (config.recompute == "selective")
    return {"mfu": shape.flops_per_iteration(config.gbs) / (seconds * peak), "hfu": executed / (seconds * peak)}


def printed_rates(log: RunLog) -> dict[str, float]:
    """`printed`: FLOP/s per GPU as the log has them, the median of its lines by its dialect's own definition."""
    column = log.column("flops_per_s_per_gpu")
    later = column[1:] if np.isfinite(column[1:]).any() else column
    return {"printed": float(np.nanmedian(later))} if np.isfinite(later).any() else {}
