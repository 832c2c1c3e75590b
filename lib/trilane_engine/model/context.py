"""Context parallelism: the ranks of a group share each sequence, and gather its keys and values in
every attention.

Rank r of n holds the chunks r and 2 n - 1 - r of 2 n, so that all attend to as many keys
(megatron-core's get_batch_on_this_cp_rank). Llama 3's training gathers, too (Grattafiori et al.
2024, arXiv:2407.21783, section 3.3.2); that runs on every card and on CPUs, but keys and values of
the whole sequence stay for the backward pass, where a ring (Transformer Engine's) keeps those of a
rank. S sequence, s = S / n of it, B microbatch, G heads, D channels.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def ranks() -> int:
    """The number of ranks that share a sequence."""
    return parallel_state.get_context_parallel_world_size()


def own_chunks() -> tuple[int, int]:
    """The two chunks of this rank."""
    rank = parallel_state.get_context_parallel_rank()
    return rank, 2 * ranks() - 1 - rank


def own_part(whole: Tensor, dim: int = 0) -> Tensor:
    """This rank's chunks, S -> s in dimension `dim`."""
    if ranks() == 1:
        return whole
    chunks = whole.chunk(2 * ranks(), dim)
    return torch.cat([chunks[number] for number in own_chunks()], dim)


def gathered(part: Tensor) -> Tensor:
    """(s, B, G, D) of each rank -> (S, B, G, D) in the order of the text; gradients of all ranks
    are added up.
    """
    group = parallel_state.get_context_parallel_group()
    chunks = gather_from_sequence_parallel_region(part, group=group).chunk(2 * ranks())
    return torch.cat([*chunks[::2], *chunks[::-2]])


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Of queries and keys (B, heads, length, D): the last query sees all keys, each before it one
    less.

    On a GPU flash attention knows this by name, and keeps no mask.
    """
    queries = q.size(2)
    keys = k.size(2)
    if q.is_cuda:
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
