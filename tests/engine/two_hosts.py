"""`trilane.engine.bench` on one machine that looks like two: half of the ranks find themselves on another host."""

import os
import platform
import sys

from trilane.engine.bench.__main__ import main

if __name__ == "__main__":
    host = f"gpu{1 + int(os.environ['SLURM_PROCID']) // 2:03d}.example"
    platform.node = lambda: host
    sys.exit(main(sys.argv[1:]))
