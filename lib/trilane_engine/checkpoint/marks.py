"""The mark of a part of a tensor, computed on its device; workspace.fingerprints has what it is
for.

Apart from `fingerprints`, so that who compares marks waits for torch alone and not for
megatron-core.
"""

import functools
import operator

import torch

from trilane.workspace.fingerprints import SKETCHES, Box, Mark, planes, sides, weights


def mark(part: torch.Tensor, box: Box) -> Mark:
    """The Mark of `part`, the part `box` of its tensor; from a GPU only a few numbers
    are copied.
    """
    if len(box) == 3:
        return functools.reduce(operator.add, map(mark, part, planes(box)))
    (first, end), (left, right) = sides(box)
    x = part.detach().to(torch.float32).reshape(end - first, right - left).contiguous()
    u, s = (torch.from_numpy(side).to(x.device) for side in weights(first, end, 1))
    v, t = (torch.from_numpy(side).to(x.device) for side in weights(left, right, 2))
    # Values at a time: on a GPU its temporaries are 16 bytes for each, on a CPU they fit in the
    # processor's cache.
    rows = max(1, (1 << 24 if x.is_cuda else 1 << 15) // x.shape[1])
    total_hash = torch.zeros((), dtype=torch.int64, device=x.device)
    floats = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=x.device)
    for at in range(0, len(x), rows):
        block = x[at : at + rows]
        total_hash += ((block.view(torch.int32) * v).sum(1) * u[at : at + rows]).sum()
        floats[0] += torch.linalg.vector_norm(block, dim=1).double().square().sum()
        floats[1:] += ((block @ t) * s[at : at + rows]).sum(0, dtype=torch.float64)
    low, high = torch.stack(torch.aminmax(x)).tolist()
    squares, *sketch = floats.tolist()
    return Mark(
        hash=int(total_hash.item()) % 2**64,
        squares=squares,
        low=low,
        high=high,
        sketch=tuple(sketch),
    )
