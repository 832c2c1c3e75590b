"""The pipeline schedule of a plan, to scale: when each stage computes which pass of which
microbatch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trilane.config.parallelism import Topology
from trilane.costmodel.predict import Prediction
from trilane.utils.frozen import frozen

Step = tuple[bool, int, int]  # whether it is a forward pass, its microbatch, its model chunk


class Pass(NamedTuple):  # of a dataclass 50,000 take twice as long
    """The forward or backward pass of one microbatch through one model chunk of one stage; seconds
    from the start.
    """

    stage: int
    is_forward: bool
    microbatch: int
    chunk: int
    start: float
    end: float


@frozen
class PipelineSchedule:
    """All passes of one iteration, stage by stage in their order, and what follows them on every
    stage.

    stage_seconds       one microbatch, forward and backward, its sends counted, on each stage
    data_parallel, optimizer   seconds after the last pass
    """

    stage_seconds: tuple[float, ...]
    passes: tuple[Pass, ...]
    data_parallel: float = 0.0
    optimizer: float = 0.0

    @property
    def pipeline_end(self) -> float:
        """Seconds until the last pass ends."""
        return max(p.end for p in self.passes)

    @property
    def end(self) -> float:
        """Seconds of the iteration as scheduled."""
        return self.pipeline_end + self.data_parallel + self.optimizer


def pipeline_schedule(topology: Topology, prediction: Prediction) -> PipelineSchedule:
    """The schedule of a predicted plan.

    1F1B: a stage runs at most p - i microbatches ahead, then one forward and one backward pass in
    turn; interleaved with v chunks a stage where the plan has them, in rounds of p microbatches:
    Narayanan et al. 2021, arXiv:2104.04473, section 2.2 and figure 4. A stage's seconds are those
    predicted, with the exposed seconds of its sends, and spread evenly over its chunks (left out:
    embedding and head are on one chunk).

    The prediction is a formula (iteration.py): m microbatches at the pace of the slowest stage, and
    once through the others. With equal stages, or where the last one is the slowest, the schedule
    ends exactly when the prediction does. Otherwise it ends earlier, by the whole predicted bubble
    at most: stages that wait for a slow one do a part of their fill and drain meanwhile. Over 600
    plans of four searches that was 0.01 % of the iteration at most, with stages that have a number
    of layers of their own and several chunks 7 %.
    """
    m = topology.microbatches
    time = prediction.time
    # parts inside a pass, of a microbatch on the slowest stage
    parts = (time.matmul, time.attention, time.elementwise, time.tensor_parallel)
    computed = sum(parts, time.expert_parallel) / m
    scale = computed / max(prediction.stage_seconds)  # what the pressure on the card's memory adds
    sent = time.pipeline_p2p / m
    stages = [seconds * scale + sent for seconds in prediction.stage_seconds]
    # a backward pass has twice the FLOPs of a forward pass, and full recomputation repeats the
    # forward pass in it (Narayanan et al., appendix); left out: that embedding and head are not
    # recomputed
    forward = 0.25 if topology.recompute == "full" else 1 / 3
    return PipelineSchedule(
        stage_seconds=tuple(stages),
        passes=tuple(passes(stages, m, topology.interleaving, forward)),
        data_parallel=time.data_parallel,
        optimizer=time.optimizer,
    )


def passes(
    stages: Sequence[float], microbatches: int, chunks: int = 1, forward: float = 1 / 3
) -> list[Pass]:
    """Every pass as early as its stage and the passes that it needs allow, in the order of steps().

    A microbatch passes forward through all chunks of all stages, then back: each pass needs the one
    before it on this way.
    """
    p = len(stages)
    queues = [list(steps(i, p, microbatches, chunks)) for i in range(p)]
    done = [0] * p
    free = [0.0] * p
    ends = dict[tuple[int, int], float]()  # by microbatch and place on its way
    found = [list[Pass]() for _ in stages]
    while any(done[i] < len(queues[i]) for i in range(p)):
        for i in range(p):
            while done[i] < len(queues[i]):
                is_forward, microbatch, chunk = queues[i][done[i]]
                place = chunk * p + i
                if not is_forward:
                    place = 2 * p * chunks - 1 - place
                if place and (microbatch, place - 1) not in ends:
                    break
                start = max(free[i], ends.get((microbatch, place - 1), 0.0))
                share = forward if is_forward else 1 - forward
                free[i] = start + stages[i] * share / chunks
                ends[microbatch, place] = free[i]
                found[i].append(Pass(i, is_forward, microbatch, chunk, start, free[i]))
                done[i] += 1
    return [step for own in found for step in own]


def steps(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Step]:
    """The passes of one stage in their order: warm-up, one forward and one backward in turn, drain.

    Interleaved, a stage warms up for 2 (p - i - 1) + (v - 1) p passes, as Megatron-LM's schedule
    does.
    """
    p = stages
    v = chunks
    total = microbatches * v
    ahead = p - stage - 1
    if v > 1:
        ahead = 2 * ahead + (v - 1) * p
    warm = min(ahead, total)
    for number in range(total + warm):
        if number < total:
            yield True, *_place(number, p, v)
        if number >= warm:
            microbatch, chunk = _place(number - warm, p, v)
            yield False, microbatch, v - 1 - chunk


def _place(number: int, stages: int, chunks: int) -> tuple[int, int]:
    """Microbatch and chunk of a stage's pass by number: rounds of p microbatches, chunk after
    chunk.
    """
    turn, rest = divmod(number, stages * chunks)
    return turn * stages + rest % stages, rest // stages
