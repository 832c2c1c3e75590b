"""A port that a child was promised reaches that child; a launcher may open enough files."""

import errno
import socket
import subprocess
import sys

import pytest

from trilane.utils.process import held_port


def test_a_held_port_goes_to_nobody_but_the_store_that_it_was_held_for() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError) as refused:
            other.bind(("127.0.0.1", port))
        assert refused.value.errno == errno.EADDRINUSE
        server = socket.create_server(("127.0.0.1", port))  # with SO_REUSEADDR, as torch's store
    with server, socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize(("soft", "hard", "after"), [(64, 4096, 1000), (64, 500, 500), (2000, 4096, 2000)])
def test_the_limit_of_open_files_is_raised_as_far_as_the_host_allows(soft: int, hard: int, after: int) -> None:
    """The first node's store has a connection to each of the 1,024 ranks of 128 nodes."""
    code = "import resource as r; from trilane.utils.process import allow_open_files as allow; "
    code += f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); allow(1000); print(r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"({after}, {hard})\n"
