"""A port that a child was promised reaches that child."""

import errno
import socket

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
