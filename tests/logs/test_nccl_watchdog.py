"""Ranks missing from a collective, by the ranks' NCCL watchdogs in the formats of torch 2.2 to
2.13.

Lines in the form of
https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and
TraceUtils.h of the same folder, with numbers of our own.
"""

import pytest
from test_log_dialects import m2021

from trilane.logs.run import read_log

START = "using world size: 8, data-parallel-size: 8\n" + "".join(map(m2021, range(1, 6)))
CAUGHT = "[E ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={at}, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600038 milliseconds before timing out."


def new(r, at, enqueued, group="PG ID 0 PG GUID 0(default_pg)", member=None):
    """Torch 2.6 and later: the rank in brackets is the one in the group."""
    m = r if member is None else member
    return (
        f"[rank{r}]:{CAUGHT.format(r=m, at=at)}\n"
        f"[rank{r}]:[E1120 04:00:11.9 ProcessGroupNCCL.cpp:2271] [{group} Rank {m}]  failure detected by watchdog at work "
        f"sequence id: {at} PG status: last enqueued work: {enqueued}, last completed work: {at - 1}\n"
    )


def dump(r, enqueued, group="PG ID 0 PG GUID 0(default_pg)"):
    """The heartbeat monitor of a rank that waits for nothing itself."""
    return (
        f"[rank{r}]:[E1120 04:00:12.1 ProcessGroupNCCL.cpp:1987] [{group} Rank {r}] Received a dump signal due to a collective timeout "
        f"from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {enqueued}.This is\n"
    )


WORK = "timed out in work {} (ALLREDUCE); last enqueued {}, last completed {}"
NONE = "nothing of them is in this log"
TP = "PG ID 5 PG GUID 37(TENSOR_MODEL_PARALLEL_GROUP)"
HANGS = {
    "one reports that it is behind": (
        "".join(new(r, 1234, 1236) for r in range(7)) + dump(7, 1230),
        [
            "default_pg: ranks 7: last enqueued 1230, last completed 1230",
            f"default_pg: ranks 0-6: {WORK.format(1234, 1236, 1233)}",
        ],
    ),
    "one prints nothing": (
        "".join(new(r, 1234, 1236) for r in range(8) if r != 3),
        [f"default_pg: ranks 3: {NONE}", f"default_pg: ranks 0-2, 4-7: {WORK.format(1234, 1236, 1233)}"],
    ),
    "an error is no timeout": (
        "[rank3]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 3] Exception (either an error or timeout) detected "
        "by watchdog at work: 32, last enqueued NCCL work: 32, last completed NCCL work: 31.\n[rank3]: DistBackendError: NCCL error\n",
        [],
    ),
    "an exception repeats the line without the rank": (
        new(4, 88, 90, TP, member=0) + new(5, 88, 90, TP, member=1) + f"  what():  [{TP} Rank 1] Process group watchdog thread "
        f"terminated with exception: {CAUGHT.format(r=1, at=88)[31:]}\n",
        [f"TENSOR_MODEL_PARALLEL_GROUP 37: ranks 4-5: {WORK.format(88, 90, 87)}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HANGS.values(), ids=HANGS.keys())
def test_the_ranks_of_each_report_are_listed(tmp_path, text, expected):
    (tmp_path / "a.log").write_text(START + text)
    assert read_log(tmp_path / "a.log").collectives == tuple(expected)
