"""Letting the expected programs, and no others, connect to a port that anybody may find."""

import hashlib
import math
import selectors
import socket
import time
from collections.abc import Iterator

SECRET_BYTES = 32
_SECONDS_TO_GREET = 10
_MOST_STRANGERS = 64  # connections that have not sent a whole secret


def digest_of(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def admit(
    server: socket.socket, expected: dict[str, int], timeout_seconds: float = math.inf
) -> Iterator[tuple[int, socket.socket]]:
    """Yield (number, connection) of each expected program as it connects, then close `server`.

    expected: digest of a program's secret -> its number. A program begins by sending its secret, of
        `SECRET_BYTES`. A secret admits one connection, so it is worthless once it was used.
    Connections that send anything else, or take longer than `_SECONDS_TO_GREET`, are closed; beyond
    `_MOST_STRANGERS` the oldest of them is. Raises TimeoutError if a program does not come in time.
    """
    expected, deadline = dict(expected), time.monotonic() + timeout_seconds
    strangers: dict[socket.socket, tuple[float, bytes]] = {}  # oldest first -> (came at, has sent)
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        try:
            while expected:
                ready = [key.fileobj for key, _ in selector.select(min(1.0, timeout_seconds))]
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError(
                        f"{len(expected)} expected programs did not connect within {timeout_seconds:g} s"
                    )
                for connection in strangers.keys() & ready:
                    came_at, sent = strangers[connection]
                    try:
                        data = connection.recv(SECRET_BYTES - len(sent))
                    except OSError:
                        data = b""
                    strangers[connection] = came_at, sent + data
                    if data and len(sent + data) < SECRET_BYTES:
                        continue
                    selector.unregister(connection)
                    number = expected.pop(digest_of(sent + data), None)
                    del strangers[connection]
                    if number is None:
                        connection.close()
                    else:
                        yield number, connection
                late = [
                    x for x, (came_at, _) in strangers.items() if now - came_at > _SECONDS_TO_GREET
                ]
                for connection in late or list(strangers)[:-_MOST_STRANGERS]:
                    selector.unregister(connection)
                    del strangers[connection]
                    connection.close()
                if server in ready:
                    try:
                        connection, _ = server.accept()
                    except OSError:  # it was closed already, or too many files are open
                        time.sleep(0.1)
                        continue
                    strangers[connection] = now, b""
                    selector.register(connection, selectors.EVENT_READ)
        finally:
            for connection in strangers:
                connection.close()
