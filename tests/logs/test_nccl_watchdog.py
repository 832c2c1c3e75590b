"""Ranks whose NCCL watchdogs report a time-out, in the formats of torch 2.2 to 2.13.

Lines in the form of
https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp with
numbers of our own.
"""

import pytest
from test_log_dialects import m2021

from trilane.logs.run import read_log

START = "using world size: 8, data-parallel-size: 8\n" + "".join(map(m2021, range(1, 6)))


def caught(r):
    return (
        f"[rank{r}]:[E ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600038 milliseconds before timing out.\n"
    )


DUMP = (  # the heartbeat monitor of a rank that waits for nothing itself
    "[rank7]:[E ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 7] Received a dump signal due to a collective timeout "
    "from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 9, last completed NCCL work: 9.\n"
)
ERROR = (
    "[rank3]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 3] Exception (either an error or timeout) detected "
    "by watchdog at work: 32, last enqueued NCCL work: 32, last completed NCCL work: 31.\n[rank3]: DistBackendError: NCCL error\n"
)
LINE = "timed out in a collective: ranks {}; this log has no time-out of ranks {}"
HANGS = {
    "one reports that it is behind": ("".join(map(caught, range(7))) + DUMP, ["0-6", "7"]),
    "one prints nothing": ("".join(caught(r) for r in range(8) if r != 3), ["0-2, 4-7", "3"]),
    "an error is no timeout": (ERROR, []),
}


@pytest.mark.parametrize(("text", "ranks"), HANGS.values(), ids=HANGS.keys())
def test_the_ranks_that_timed_out_and_the_others_are_listed(tmp_path, text, ranks):
    (tmp_path / "a.log").write_text(START + text)
    expected = (LINE.format(*ranks),) if ranks else ()
    assert read_log(tmp_path / "a.log").collectives == expected
