"""How runs end, with the line that proves it; and what cannot be read."""

import gzip
import os
import random
from pathlib import Path

import pytest
from test_log_dialects import SAMPLES, m2021
from test_reader import deepspeed

from trilane.logs import endings
from trilane.logs.run import read_log
from trilane.workspace.status import Status

HERE = Path(__file__).parent
FIVE = "".join(map(m2021, range(1, 6)))
TEN = FIVE + "".join(map(m2021, range(6, 11)))
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.15 GiB\n"
WATCHDOG = "[Rank 12] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 1800000 ms\n"
NCCL = "[rank5]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited\n"
BLOCKED = "[rank6]:[E1002] [Rank 6] Work WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) timed out in blocking wait.\n"
STOPPED = "trilane: stopped at iteration 5 by SIGTERM, saved checkpoints/iter_0000005\n"
CANCEL = "slurmstepd: error: *** JOB 42 ON r1n1 CANCELLED AT 2026-08-01T12:00:00 ***\n"
SRUN = "srun: error: r1n1: task 6: Exited with exit code 1\n"
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nAssertionError: heads\n'
ELASTIC = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    + "=" * 60
    + "\npretrain_gpt.py FAILED\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-08-01_12:00:00\n  host      : r1n1\n"
    "  rank      : 9 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n  error_file: <N/A>\n"
)
DONE = "[after training is done] datetime: 2026-08-01 12:00:00\n"
KERNEL = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n"

# torch 1.9 to 1.13:
# https://github.com/pytorch/pytorch/blob/v1.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
CAUGHT = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 1809147 ms\n"
ABORTED = "[E ProcessGroupNCCL.cpp:325] Some NCCL operations have failed or timed out.\n"
THROWN = "terminate called after throwing an instance of 'std::runtime_error'\n"
ENDINGS = [
    ("completed", TEN, "iteration       10/      10", None),
    (
        "completed",
        "{'loss': 2.5, 'grad_norm': 0.75, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
        + "{'train_runtime': 9.0, 'train_samples_per_second': 1.0}\n",
        "train_runtime",
        None,
    ),
    ("OOM", FIVE + OOM, "Tried to allocate 2.50 GiB", 3),
    ("hang", FIVE + WATCHDOG + NCCL + SRUN, "Watchdog caught", None),
    (
        "cancelled",
        FIVE + CANCEL + "Killing subprocess 12\nsrun: error: r1n1: task 0: Terminated\n",
        "CANCELLED AT",
        None,
    ),
    ("crashed", FIVE + TRACE + ELASTIC + SRUN + CANCEL, "AssertionError: heads", None),
    ("killed", FIVE + ELASTIC, "exitcode  : -9 (pid: 77)", 9),
    ("unfinished", FIVE + " [2026-08-01 12:00:08] iteration    ", "iteration        5/", None),
    ("hang", FIVE + ABORTED + THROWN + "  what():  " + CAUGHT.format(5), "Rank 5", None),
    ("completed", FIVE + OOM + TEN[len(FIVE) :], "iteration       10/", None),
    (
        "OOM",
        FIVE + OOM + m2021(6),
        "Tried to allocate 2.50 GiB",
        3,
    ),  # the rank that prints iterations lags
    (
        "OOM",
        FIVE + m2021(6) + OOM + "[exiting program at iteration 6] datetime: 2026-08-01\n",
        "2.50 GiB",
        3,
    ),
    ("GPU error", FIVE + DONE + KERNEL + SRUN, "Xid", None),
    ("unfinished", FIVE + OOM + m2021(6) + m2021(7), "iteration        7/", None),
    ("OOM", FIVE[:-1] + OOM, "[rank3]: torch.OutOfMemoryError", 3),  # behind an iteration
    ("OOM", "[batch=1/20]:\n\t Train loss/train/total: 9.5" + OOM, "[rank3]: torch.Out", 3),
    ("crashed", FIVE[:-1] + TRACE.replace("AssertionError", "[rank3]: Halt"), "[rank3]: Halt:", 3),
    ("crashed", FIVE + SRUN[:-1] + "43\n" + SRUN.replace("6", "7"), "task 7", None),
    (
        "hang",
        "Epoch 0:  1%|#| 1/9 [00:01<01:40, reduced_train_loss=2.5]" + BLOCKED,
        "[rank6]:[E",
        6,
    ),
    ("stopped", FIVE + STOPPED, "saved checkpoints/iter_0000005", None),
]


def old(folder, text):
    """A log of that text that nobody has written to for long: its run has ended."""
    (folder / "a.log").write_text(text)
    os.utime(folder / "a.log", (0, 0))
    return folder / "a.log"


@pytest.mark.parametrize(
    ("status", "text", "evidence", "rank"),
    ENDINGS,
    ids=[f"{i}-{e[0]}" for i, e in enumerate(ENDINGS)],
)
def test_the_status_of_a_run_has_a_line_that_proves_it(tmp_path, status, text, evidence, rank):
    log = read_log(old(tmp_path, text))
    assert (log.status, log.rank) == (status, rank) and isinstance(log.status, Status)
    assert evidence in log.evidence and log.evidence in text


TABLE = [
    line for line in (HERE / "endings.txt").read_text().splitlines() if not line.startswith("#")
]


@pytest.mark.parametrize(
    "row", TABLE, ids=[f"{i}-{row.partition(' |')[0]}" for i, row in enumerate(TABLE)]
)
def test_an_ending_has_its_cause_its_node_and_what_to_exclude(tmp_path, row):
    """Lines in the form of those of SLURM, the kernel, CUDA, NCCL, PyTorch, ...: endings.txt names
    the source of each.
    """
    status, hosts, exclude, line = (cell.strip() for cell in row.split("|", 3))
    log = read_log(old(tmp_path, FIVE * (status != "rendezvous") + line + "\n"))
    assert (log.status, ",".join(log.hosts), log.exclude) == (status, hosts, exclude)
    assert log.evidence == line


def test_lines_that_only_mention_failures_end_no_run(tmp_path):
    for line in (HERE / "harmless.txt").read_text().splitlines():
        assert read_log(old(tmp_path, FIVE + line + "\n")).status == "unfinished", line


def test_no_word_of_an_ordinary_line_starts_the_search_for_endings(tmp_path, monkeypatch):
    """Iterations of all trainers with DeepSpeed's lines among them; and the lines of a form are
    held against all rules once.
    """
    for line in "\r".join(line for s in SAMPLES.values() for line in s["text"]).split("\r"):
        text = line.encode()
        assert not endings.any_word().search(text) or endings.ending(text, 0), line
    calls = []
    ending = endings.ending
    monkeypatch.setattr(endings, "ending", lambda *given: calls.append(given) or ending(*given))
    read_log(old(tmp_path, "".join(m2021(i, 900) + deepspeed(i) for i in range(1, 900))))
    assert len(calls) < 10


XID = "Nov 20 04:00:11 gpu03 kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n"
ECC = "[rank17]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
PEERS = "".join(NCCL.replace("5]", f"{rank}]") for rank in (*range(17), *range(18, 32)))
OF_RANK = (
    "gpu05:81:99 [1] NCCL INFO comm 0x55d rank 17 nranks 32 cudaDev 1 busId 1b000 - Init COMPLETE\n"
)
SMALLER = (
    "gpu09:81:99 [3] NCCL INFO comm 0x55e rank 17 nranks 18 cudaDev 3 busId 1b000 - Init COMPLETE\n"
)
WORLD = "using world size: 32, data-parallel-size: 32\n"
ENTRY = "[{i}]:\n  time      : 2026-08-01_12:00:{s}\n  host      : {host}\n  rank      : {rank} (local_rank: {local})\n  exitcode  : {code} (pid: 7)\n"
FIRST = "Root Cause (first observed failure):\n"
ONE = ENTRY.format(i=1, s="01", host="r1n1", rank=5, local=5, code=-6)
TWO = ENTRY.format(i=0, s="09", host="r1n1", rank=4, local=4, code=-6)
THREE = ENTRY.format(i=1, s="05", host="r1n2", rank=9, local=1, code=-6)
FOUR = ENTRY.format(i=0, s="04", host="r1n2", rank=11, local=3, code=-9)
TABLES = (
    f"ChildFailedError: \nFailures:\n{ONE}{FIRST}{TWO}{'=' * 60}\nFailures:\n{THREE}{FIRST}{FOUR}"
)
TORCHRUN = ELASTIC.replace("rank      : 9 (local", "rank      : 17 (local")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PEERS + XID, ("GPU error", ("gpu03",), "gpu03", None)),
        (WORLD + PEERS + ECC + SRUN.replace("task 6", "task 17"), ("GPU error", ("r1n1",), "r1n1", 17)),
        # the first process of mpirun on a node may have started other ranks
        (PEERS + ECC + "noticed that process rank 17 with PID 0 on node r1n1 exited on signal 9\n", ("GPU error", (), "", 17)),
        (PEERS + ECC + SRUN.replace("task 6", "task 17"), ("GPU error", (), "", 17)),
        ("4: " + ECC[10:] + SRUN.replace("task 6", "task 4"), ("GPU error", ("r1n1",), "r1n1", None)),
        (WORLD + SMALLER + OF_RANK + SMALLER + PEERS + ECC, ("GPU error", ("gpu05",), "gpu05", 17)),
        (PEERS + ECC + TORCHRUN, ("GPU error", ("r1n1",), "r1n1", 17)),
        (XID + XID.replace("gpu03", "gpu04"), ("GPU error", ("gpu03", "gpu04"), "gpu03,gpu04", None)),
        (XID.replace("gpu03", "gpu03.site.org"), ("GPU error", ("gpu03.site.org",), "gpu03", None)),
        (XID.replace("gpu03", "a;reboot"), ("GPU error", (), "", None)),
        (NCCL + "[rank3]: ValueError: heads\n", ("crashed", (), "", 3)),
        (WATCHDOG + "Exception ignored in: <function f>\n" + TRACE, ("hang", (), "", None)),
        (TABLES, ("killed", ("r1n2",), "", 11)),
        # torchrun kills who does not end
        (TABLES.replace("-9", "1").replace("-6", "-9", 1), ("crashed", (), "", None)),
        (XID + m2021(6) + m2021(7), ("unfinished", (), "", None)),
    ],
)  # fmt: skip
def test_the_first_cause_counts_and_names_the_node_at_fault(tmp_path, text, expected):
    """500 ranks print NCCL errors when one loses its GPU; an invalid host name is not offered to a
    shell.
    """
    log = read_log(old(tmp_path, FIVE + text))
    assert (log.status, log.hosts, log.exclude, log.rank) == expected


BAD = [
    ("missing.log", None, "no such file"),
    ("empty.log", b"", "is empty"),
    ("cut.log.gz", gzip.compress(FIVE.encode() * 50)[:-9], "a damaged gzip file"),
    ("broken.log.gz", gzip.compress(FIVE.encode() * 50)[:80] + b"\0" * 300, "a damaged gzip file"),
    ("binary.log", random.Random(1).randbytes(20000), "is a binary file"),
    ("prose.log", b"step 1 of my recipe | iteration of soup\n" * 1000, "holds no iteration line"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[name for name, *_ in BAD])
def test_a_file_that_is_no_log_is_one_clear_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^log=.*{name}: {message}") as caught:
        read_log(tmp_path / name)
    assert "\n" not in str(caught.value)


HARD = [
    ("gzip", gzip.compress(TEN.encode())),
    ("no UTF-8", b"caf\xe9 \xff\xfe\n" + TEN.encode()),
    ("Windows line ends", TEN.replace("\n", "\r\n").encode()),
    ("a progress bar over itself", b"10%\r20%\r" + TEN.encode().replace(b"\n", b"\r100%\n")),
    ("escape codes", TEN.replace(" | ", "\x1b[0m | \x1b[32m").encode()),
    ("10 MB of brackets and bars", b"{'|[ " * 2_000_000 + b"\n" + TEN.encode()),
    (
        "lines of blanks",
        b"".join(w + b" " * 2500 + b"\n" for w in (b"", b"time (ms) | ", b"|")) + TEN.encode(),
    ),
]


@pytest.mark.parametrize(("kind", "content"), HARD, ids=[kind for kind, _ in HARD])
def test_a_hard_file_is_read_all_the_same(tmp_path, kind, content):
    (tmp_path / "a.log").write_bytes(content)
    log = read_log(tmp_path / "a.log")
    assert list(log.iterations["iteration"]) == list(range(1, 11))
    assert set(log.iterations["lm_loss"]) == {5.0} and set(log.iterations["sec_per_it"]) == {2.0}
