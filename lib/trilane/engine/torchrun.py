"""torchrun that ends with the process that started it, and that writes down which ranks failed, and how.

`python -m trilane.engine.torchrun FAILURES.json <torchrun's arguments>`; torchrun itself only prints a report.
"""

import json
import os
import sys
from pathlib import Path

from trilane.engine.parent import announce, die_with_parent


def main(argv: list[str]) -> int:
    """torchrun's exit code; FAILURES.json holds [{"rank": .., "pid": .., "exitcode": ..}], those that failed first."""
    die_with_parent()
    os.environ.update(announce({}))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(argv[1:]))
    except ChildFailedError as error:
        failures = [{"rank": r, "pid": f.pid, "exitcode": f.exitcode} for r, f in sorted(error.failures.items())]
        Path(argv[0]).write_text(json.dumps(failures), encoding="utf-8")
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
