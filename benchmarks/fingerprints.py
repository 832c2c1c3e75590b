"""What a fingerprint costs: milliseconds for a million values, bytes for a tensor, against a
checkpoint's own hash.

`python benchmarks/fingerprints.py` on one core; with a GPU also there.
"""

import json
import time
import zlib
from collections.abc import Callable

import torch

from trilane.workspace.fingerprints import Part
from trilane_engine.checkpoint.marks import mark

SIZE = 1000  # rows and columns: a million values
TIMES = 9


def best_ms(call: Callable[[], object]) -> float:
    """The shortest of some times."""
    found = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return 1e3 * min(found)


def main() -> None:
    torch.set_num_threads(1)
    box = ((0, SIZE), (0, SIZE))
    for device in ["cpu", *["cuda"] * torch.cuda.is_available()]:
        x = torch.randn(SIZE, SIZE, device=device)
        cost = best_ms(lambda x=x: mark(x, box))  # type: ignore[misc]
        print(
            f"{device}: {cost:.2f} ms for a million values, {4 * cost:.2f} ms for a million parameters of 4 kinds"
        )
    data = torch.randn(SIZE, SIZE).numpy()
    print(
        f"CRC-32, which a checkpoint's files are checked by: {best_ms(lambda: zlib.crc32(data)):.2f} ms"
    )
    small = torch.randn(SIZE)
    print(f"a vector of {SIZE}: {best_ms(lambda: mark(small, ((0, SIZE),))):.2f} ms")
    marks = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq", "copy"), mark(small, ((0, SIZE),)))
    part = Part(
        name="decoder.layers.0.mlp.linear_fc1.bias",
        shape=(SIZE,),
        box=((0, SIZE),),
        decay=0.0,
        marks=marks,
    )
    print(f"a tensor of 4 kinds: {len(json.dumps(part.to_json()))} bytes")


if __name__ == "__main__":
    main()
