"""Programs that know a secret are admitted, and others are not, whatever they do at the port."""

import contextlib
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtitan.tools import admission
from torchtitan.tools.admission import admit, digest_of


@pytest.fixture
def door():
    """(server, address, secrets): two programs are expected."""
    server, known = socket.create_server(("127.0.0.1", 0)), [secrets.token_bytes(32), b"2" * 32]
    yield server, server.getsockname(), known
    server.close()


def expected(known):
    return {digest_of(secret): number for number, secret in enumerate(known)}


def connect(address, data=b""):
    connection = socket.create_connection(address)
    connection.sendall(data)
    return connection


def test_each_secret_admits_one_connection_and_then_the_port_is_closed(door):
    server, address, known = door
    sent = [known[1], known[1], known[0][:31], b"0" * 32, known[0] + b"rest"]
    connections = [connect(address, data) for data in sent]
    admitted = dict(admit(server, expected(known), 60))
    assert [admitted[n].getpeername() for n in (0, 1)] == [
        connections[n].getsockname() for n in (4, 0)
    ]
    assert admitted[0].recv(9) == b"rest"
    for n in (1, 2, 3):  # closed by the server
        with contextlib.suppress(ConnectionResetError):
            assert connections[n].recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(address)


def test_idle_connections_are_few_and_do_not_stay(door, monkeypatch):
    server, address, known = door
    monkeypatch.setattr(admission, "_SECONDS_TO_GREET", 3600)
    idle = [connect(address, b"begun") for _ in range(100)]
    with ThreadPoolExecutor(1) as pool:
        admitted = pool.submit(lambda: dict(admit(server, expected(known), 60)))
        assert idle[0].recv(1) == b"" and idle[33].recv(1) == b""  # 64 and 2 stay
        monkeypatch.setattr(admission, "_SECONDS_TO_GREET", 0)
        assert idle[99].recv(1) == b""
        monkeypatch.undo()
        members = [connect(address, secret) for secret in known]
        assert sorted(admitted.result()) == [0, 1] and len(members) == 2


def test_program_that_does_not_come_is_not_waited_for_without_a_limit(door):
    server, address, known = door
    with (
        connect(address, known[1]),
        pytest.raises(TimeoutError, match="^1 expected programs did not connect within 0.5 s"),
    ):
        list(admit(server, expected(known), 0.5))
