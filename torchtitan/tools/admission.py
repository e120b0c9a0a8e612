"""Accepts connections only from expected programs, on a port that any program may connect to."""

import contextlib
import hashlib
import math
import selectors
import socket
import time
from collections.abc import Iterator

SECRET_BYTES = 32
_SECONDS_TO_GREET = 30
# Limit of unauthenticated connections, beyond one per expected program.
_MOST_STRANGERS = 64


def digest_of(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def admit(
    server: socket.socket, expected: dict[str, int], timeout_seconds: float | None = None
) -> Iterator[tuple[int, socket.socket]]:
    """Yield (number, connection) of each expected program as it connects, then close `server`.

    expected: digest of a program's secret -> the program's number. A program sends its secret
        (`SECRET_BYTES`) first. A secret admits one connection. All other connections are closed.
    timeout_seconds: raise TimeoutError unless all programs connect within this time. Each yielded
        connection gets the same timeout.
    """
    expected, deadline = dict(expected), time.monotonic() + (timeout_seconds or math.inf)
    # Connection -> (arrival time, bytes received).
    strangers: dict[socket.socket, tuple[float, bytes]] = {}
    with server, selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_end:
        at_end.callback(lambda: [connection.close() for connection in strangers])
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        while expected:
            ready = [key.fileobj for key, _ in selector.select(min(1.0, timeout_seconds or 1))]
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(
                    f"{len(expected)} expected programs did not connect within {timeout_seconds:g} s"
                )
            refused = [
                x for x, (came_at, _) in strangers.items() if now - came_at > _SECONDS_TO_GREET
            ]
            refused += list(strangers)[: -_MOST_STRANGERS - len(expected)]
            for connection in strangers.keys() & ready:
                came_at, sent = strangers[connection]
                try:
                    data = connection.recv(SECRET_BYTES - len(sent))
                except OSError:
                    data = b""
                strangers[connection] = came_at, sent + data
                number = expected.pop(digest_of(sent + data), None)
                if number is not None:
                    selector.unregister(connection)
                    del strangers[connection]
                    connection.settimeout(timeout_seconds)
                    yield number, connection
                elif not data or len(sent + data) == SECRET_BYTES:
                    refused.append(connection)
            for connection in strangers.keys() & refused:
                selector.unregister(connection)
                del strangers[connection]
                connection.close()
            if server in ready:
                try:
                    connection, _ = server.accept()
                    strangers[connection] = now, b""
                    selector.register(connection, selectors.EVENT_READ)
                except OSError:  # the client has closed the connection, or too many files are open
                    time.sleep(0.1)
