"""320 traces of 45 MB each: how long until the last call of every rank is known, and how much was
read.

Sparse files: their size is what a reader of the whole would have to go through, their tails are
real. The page cache is cold where the system lets us drop it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trilane_diagnose.stacks import last_calls

FILES, SIZE = 320, 45_000_000
CALL = " --- modulename: {m}, funcname: {f}\n{m}.py({n}):         work.wait()\n"


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        for rank in range(FILES):
            path = Path(place) / f"trace-node{rank // 8}-{rank % 8}-{4000 + rank}.txt"
            tail = "".join(CALL.format(m="training", f="train", n=n) for n in range(3000))
            tail += CALL.format(
                m="distributed_c10d", f="broadcast" if rank == 77 else "all_reduce", n=1191
            )
            with path.open("wb") as file:
                file.truncate(SIZE - len(tail))
                file.seek(0, os.SEEK_END)
                file.write(tail.encode())
        subprocess.run(["sync"], check=True)
        if os.access("/proc/sys/vm/drop_caches", os.W_OK):
            Path("/proc/sys/vm/drop_caches").write_text("1")
        begin = time.perf_counter()
        calls = last_calls(Path(place))
        first = calls.groups[0]
        seconds = time.perf_counter() - begin
        print(f"{FILES} traces in {seconds:.2f} s; rarest: {first}")


if __name__ == "__main__":
    main()
