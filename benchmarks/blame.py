#!/usr/bin/env python
"""Wrong ranks named and healthy nodes excluded, of logs of launches made at random: blame.py [LOGS]."""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("logs", "costmodel", ".")]
from launches import launch  # noqa: E402
from test_log_dialects import m2021  # noqa: E402

from trilane.logs.run import read_log  # noqa: E402


def main(logs: int = 2000) -> int:
    """Print the counts by launcher."""
    counts, begin = Counter[tuple[str, str]](), "".join(map(m2021, range(1, 6)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.log")
        for seed in range(logs):
            made = launch(seed)
            path.write_text(begin + made.text)
            os.utime(path, (0, 0))
            log, node = read_log(path), made.node.partition(".")[0]
            counts[made.launcher, "logs"] += 1
            counts[made.launcher, "rank named"] += log.rank is not None
            counts[made.launcher, "wrong rank"] += log.rank not in (None, made.rank)
            counts[made.launcher, "node excluded"] += log.exclude != ""
            counts[made.launcher, "healthy node excluded"] += log.exclude not in ("", node)
    for (launcher, what), count in sorted(counts.items()):
        print(f"{launcher:10} {what:22} {count}")
    return sum(count for (_, what), count in counts.items() if what in ("wrong rank", "healthy node excluded"))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
