"""Marks of tensors where they are, as fingerprint.mark makes them of numpy's."""

import torch

from trilane import fingerprint
from trilane.fingerprint import SKETCHES, WORD, Box, Mark, sides, weights

BLOCK = 1 << 24  # values at a time on a GPU: its temporaries are 16 bytes each


def mark(part: torch.Tensor, box: Box) -> Mark:
    """The Mark of `part`, which is the part `box` of its tensor; of a GPU's tensor a few numbers leave the device."""
    plain = part.detach().to(torch.float32)
    return mark_there(plain, box) if plain.is_cuda else fingerprint.mark(plain.numpy(), box)


def mark_there(part: torch.Tensor, box: Box) -> Mark:
    """The same by torch, on the device of `part`, fp32."""
    (first, end), (left, right) = sides(box)
    x = part.reshape(end - first, right - left).contiguous()
    u, s = (torch.from_numpy(side).to(x.device) for side in weights(first, end, 1))
    v, t = (torch.from_numpy(side).to(x.device) for side in weights(left, right, 2))
    rows = max(1, BLOCK // x.shape[1])
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    floats = torch.zeros(2 + SKETCHES, dtype=torch.float64, device=x.device)
    for at in range(0, len(x), rows):
        block = x[at : at + rows]
        found += ((block.view(torch.int32) * v).sum(1) * u[at : at + rows]).sum()
        floats[0] += torch.linalg.vector_norm(block, dim=1).double().square().sum()
        floats[1] += block.sum(dtype=torch.float64)
        floats[2:] += ((block @ t) * s[at : at + rows]).sum(0, dtype=torch.float64)
    low, high = torch.stack(torch.aminmax(x)).tolist()
    squares, total, *sketch = floats.tolist()
    return Mark(hash=int(found.item()) % WORD, squares=squares, total=total, low=low, high=high, sketch=tuple(sketch))
