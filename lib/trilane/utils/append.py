"""Copy stdin to a file's end and to stdout, as `tee -a` does; a disk that fills only delays both.

`... | python -m trilane.utils.append run.log`
"""

import os
import signal
import sys
from pathlib import Path

from trilane.utils.files import Appended

PIECE = 1 << 16  # bytes


def main(path: str) -> None:
    """Copy until stdin ends; what the disk refuses is written with what it takes next."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever writes to us ends first
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's, before the time limit
    copies = [Appended(Path(path)), Appended(1)]
    while piece := os.read(0, PIECE):
        for copy in copies:
            copy.write(piece)


if __name__ == "__main__":
    main(sys.argv[1])
