"""Pre-flight checks of what the training is for: iterations, corpus and learning rate against the size of the model."""

import itertools
import math
from collections.abc import Iterator

from trilane.config.plan import Plan
from trilane.forecasting.request import TOKENS_PER_PARAMETER
from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, warn
from trilane.workspace.prepared_corpora import tokens_about

# Tokens a parameter below which no published training lies: OPT-175B had 180e9 (Zhang et al. 2022, arXiv:2205.01068),
# GPT-3 1.7 a parameter, BLOOM 2.1.
FEWEST = 1.0
BENCHMARK = 1000  # iterations: fewer, with so few tokens, are meant to measure
# Muennighoff et al. 2023, arXiv:2305.16264: up to 4 epochs are nearly as good as new data
MOST_EPOCHS = 4.0
# Parameters and largest learning rate. Brown et al. 2020 (GPT-3), arXiv:2005.14165, table 2.1; the last one is also
# that of BLOOM 176B (BigScience 2022, arXiv:2211.05100, table 3)
GPT3 = ((125e6, 6e-4), (350e6, 3e-4), (760e6, 2.5e-4), (1.3e9, 2e-4), (2.7e9, 1.6e-4), (6.7e9, 1.2e-4), (13e9, 1e-4))
LOWEST = (*GPT3, (175e9, 0.6e-4))
# Touvron et al. 2023 (LLaMA), arXiv:2302.13971, table 2, whose rates are the highest at their sizes; Llama 3 405B
# 0.8e-4 (Grattafiori et al. 2024, arXiv:2407.21783, table 3)
HIGHEST = ((125e6, 6e-4), (350e6, 3e-4), (13e9, 3e-4), (32.5e9, 1.5e-4), (65.2e9, 1.5e-4), (405e9, 0.8e-4))
FACTOR = 3.0  # beyond the known rates


def purpose(case: JobCheck) -> Iterator[JobFinding]:
    """Tokens, epochs and learning rate are those of a training of that size; a benchmark is called one, once."""
    if case.site.is_local:
        return
    plan = case.plan
    each = (tokens := trained_tokens(plan)) / plan.shape.parameters
    if each < FEWEST:
        size, count = plan.shape.parameters / 1e9, plan.run.train_iters
        message = f"{count:,} iterations are {each:.2g} tokens for each of {size:.3g}B parameters"
        enough = math.ceil(count * TOKENS_PER_PARAMETER / each)
        remedy = f"a training of {TOKENS_PER_PARAMETER:g} tokens a parameter (Chinchilla) takes train_iters={enough:,}"
        is_benchmark = count <= BENCHMARK
        yield warn(
            "tokens", message + (": a benchmark" if is_benchmark else ": no published training has so few"), remedy
        )
        if is_benchmark:
            return
    yield from _epochs(case, tokens)
    yield from _rate(plan)


def trained_tokens(plan: Plan) -> float:
    """Tokens of the whole run, of which a link of a chain trains a part."""
    return float(plan.samples * plan.shape.seq_length)


def _epochs(case: JobCheck, tokens: float) -> Iterator[JobFinding]:
    data = case.plan.data
    total = sum(part.weight for part in data.blend) or 1.0
    shares = [part.weight / total for part in data.blend] or [1.0]
    for part, share in zip(data.parts, shares, strict=True):
        has = tokens_about(part, case.folder.resolve(), case.plan.shape.vocab_size) * data.shares[0]
        epochs = tokens * share / has if has else 0.0
        if epochs > MOST_EPOCHS:
            message = f"data.source={part.source} has about {has:.2g} tokens to train on: {epochs:,.0f} epochs"
            yield warn("epochs", message, f"more text: beyond {MOST_EPOCHS:g} epochs repetition teaches less and less")


def _rate(plan: Plan) -> Iterator[JobFinding]:
    size, rate = plan.shape.parameters, plan.optimizer.lr
    if size < LOWEST[0][0]:  # small models bear more, and cost nothing
        return
    low, high = (known_rate(table, size) for table in (LOWEST, HIGHEST))
    if not low / FACTOR <= rate <= high * FACTOR:
        about = f"{low:.1e}" if math.isclose(low, high, rel_tol=0.05) else f"{low:.1e} to {high:.1e}"
        message = f"lr={rate:g}: trainings of {size / 1e9:.3g}B parameters have used {about} (GPT-3, LLaMA, BLOOM)"
        yield warn("learning rate", message, f"optimizer.lr between {low:.1e} and {high:.1e}")


def known_rate(table: tuple[tuple[float, float], ...], size: float) -> float:
    """The learning rate at that size, between the sizes of the table on a logarithmic scale."""
    for (small, left), (large, right) in itertools.pairwise(table):
        if size <= large:
            x = max(0.0, math.log(size / small) / math.log(large / small))
            return left ** (1 - x) * right**x
    return table[-1][1]


RULES: tuple[Rule, ...] = (purpose,)
