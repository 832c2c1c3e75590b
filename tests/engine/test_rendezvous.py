"""Processes that wait for one another: how long, and which of them did not come."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trilane.engine import torchrun
from trilane.engine.distributed import rendezvous
from trilane.logs.endings import ending
from trilane.utils.process import held_port
from trilane.utils.validation import HostError
from trilane.workspace.status import Status

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

HOSTS = {"TRAIN_HOSTS": "n1 n2 n3", "SLURMD_NODENAME": "n1"}


def settings(given: str, env: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=") for part in rendezvous.settings(given, env).split(","))


def test_a_node_may_come_ten_minutes_after_the_others() -> None:
    """torch's own limit for the first node is a minute. What the script itself sets stays."""
    assert settings("", {}) == {"join_timeout": "600", "read_timeout": "600", "keep_alive_max_attempt": "120"}
    assert settings("read_timeout=5, close_timeout=9", {})["read_timeout"] == "5"


def test_slurms_names_decide_which_node_hosts_the_store() -> None:
    assert [settings("", HOSTS | {"SLURMD_NODENAME": name})["is_host"] for name in ("n1", "n2")] == ["1", "0"]
    assert settings("is_host=0", HOSTS)["is_host"] == "0"


def test_what_did_not_come_is_named() -> None:
    assert rendezvous.absent_nodes({"n1", "n3.cluster"}, 3, HOSTS) == "2 of 3 nodes came, not n2"
    assert rendezvous.absent_nodes({"localhost"}, 3, HOSTS) == "1 of 3 nodes came (localhost)"
    assert rendezvous.absent_ranks({0, 1, 4}, 6, 2, HOSTS) == "3 of 6 ranks came, not rank 2, 3, 5 (on n2, n3)"
    assert rendezvous.absent_ranks({0}, 100, 8, {}).endswith("15, 16 and 83 more")


def test_nodes_that_wait_in_vain_say_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """torchrun's agents: one where the other node is missing, one where the first does not answer."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    handler = dynamic_rendezvous.DynamicRendezvousHandler
    monkeypatch.setattr(handler, "next_rendezvous", handler.next_rendezvous)
    monkeypatch.setattr(dynamic_rendezvous.socket, "getfqdn", lambda *name: "n1")  # this machine calls itself localhost
    monkeypatch.setenv("TRAIN_HOSTS", "n1 n2")
    one = [str(tmp_path / "f"), "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=7.0", "--rdzv-backend=c10d"]
    with held_port() as port:
        at = f"--rdzv-endpoint=127.0.0.1:{port}"
    assert torchrun._launch([*one, at, "--rdzv-conf=read_timeout=1,is_host=0", "x.py"]) == 1
    assert f"trilane: rendezvous=7.0: the first node does not answer at 127.0.0.1:{port}" in capfd.readouterr().err
    assert torchrun._launch([*one, at, "--rdzv-conf=join_timeout=1,is_host=1", "x.py"]) == 1
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("trilane: "))
    assert line.startswith("trilane: rendezvous=7.0: 1 of 2 nodes came, not n2 (")
    assert ending(line.encode(), 0).status is Status.RENDEZVOUS


def test_ranks_that_wait_in_vain_say_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by srun or DeepSpeed's launcher: two of four do not come, or rank 0 does not."""
    from trilane.engine.distributed import world

    def said(rank: int) -> str:
        with pytest.raises(HostError) as raised:
            world._meet(rank, 4, 2)
        assert ending(str(raised.value).encode(), 0).status is Status.RENDEZVOUS
        return str(raised.value)

    monkeypatch.setattr(rendezvous, "WAIT_S", 1)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with held_port() as port:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("TRAIN_HOSTS", "n1 n2")):
            monkeypatch.setenv(name, value)
        at = f"rendezvous=127.0.0.1:{port}: "
        assert said(1) == f"{at}rank 0 does not answer within 1 s"
    with ThreadPoolExecutor(2) as ranks:
        assert set(ranks.map(said, [0, 1])) == {f"{at}2 of 4 ranks came, not rank 2, 3 (on n2) within 1 s"}
