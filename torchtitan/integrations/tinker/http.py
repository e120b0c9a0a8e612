"""Python's HTTP server, with limits on the memory and connections that a client can take.

Requests are JSON, or the protobuf messages of `wire`; nothing in them is executed or unpickled.
"""

import contextlib
import hmac
import io
import ipaddress
import json
import logging
import select
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchtitan.integrations.tinker.requests import Refused
from torchtitan.integrations.tinker.results import Answer
from torchtitan.tools.logging import logger

Respond = Callable[[str, str, bytes], Answer]
"""(method, path, body) -> answer; raises ValueError. A connection's requests come on one thread."""
OnEnd = Callable[[int, bool, bool], Any]
"""Called with the thread of a connection that has ended; whether its client has closed it; and whether
it did so while it waited for an answer."""

_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_BYTES = "application/octet-stream"
_MAX_CONNECTIONS = 512
_SECONDS_IDLE = 10  # until a request and its headers have to be there
_SECONDS_KEPT = 15  # until the next request; more than the 10 s between two heartbeats of a client
_SECONDS_BETWEEN_LOOKS = 0.2  # at connections that wait for an answer
_CLOSED = getattr(select, "POLLRDHUP", 0)  # by the other side; Linux tells without a read
_SECONDS_PER_REQUEST = 60  # to read a request, and as long again to send the answer
_SECONDS_TO_FINISH = 5
# When this many connections have not sent a whole request, further connections wait until one of
# them does, or has taken `_SECONDS_UNREAD` and is closed.
_MAX_UNREAD = 64
_SECONDS_UNREAD = 1.0
_MAX_BYTES_DROPPED = 2**16  # of a refused request that are read before the answer


@dataclass(frozen=True)
class Access:
    """Rules for the headers of requests.

    names: the host names, in lower case, that the header Host may have besides IP addresses. They
        keep out a web page that points its own name at this machine (DNS rebinding).
    key: the value that the header X-API-Key must have; "" does not check it.
    is_signed: True for paths that need no key.
    """

    names: Collection[str] = ("localhost",)
    key: str = ""
    is_signed: Callable[[str], bool] = lambda path: False

    def check(self, headers: Any, path: str) -> None:
        """Raise Refused for headers that break a rule."""
        if headers.get("Origin") is not None:
            raise Refused("requests from web pages are not answered", 403)
        host = headers.get("Host", "")
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            is_ours = name in self.names or bool(ipaddress.ip_address(name))
        except ValueError:  # neither one of the names nor an IP address
            is_ours = False
        if not is_ours:
            raise Refused(
                f"requests must be for an IP address or one of {', '.join(self.names)}, got Host "
                f"{host[:200]!r}; add the name to rl.serve.names if it is this server's",
                403,
            )
        given = headers.get("X-API-Key", "")
        has_key = hmac.compare_digest(given.encode(), self.key.encode())
        if self.key and not has_key and not self.is_signed(path):
            raise Refused(
                "the header X-API-Key is missing or wrong; set TINKER_API_KEY to the key in the "
                "server's rl.serve.api_key_file",
                401,
            )


class HttpServer(ThreadingHTTPServer):
    """Serves on its own threads from `start` to `close`.

    port: 0 takes a free port. max_bytes: limit for a request's body.
    on_end: may be called again for a connection that was cut.
    Raises OSError if it cannot listen at the address.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        max_bytes: int,
        access: Access,
        respond: Respond,
        on_end: OnEnd = lambda *_: None,
    ):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.max_bytes, self.access, self.respond, self.on_end = max_bytes, access, respond, on_end
        self.answering: dict[socket.socket, int] = {}  # connection -> its thread
        self.lock = threading.Lock()
        self._is_closed = threading.Event()
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        # Connection without a whole request -> (a request has begun, time of that or of connecting).
        self._unread: dict[Any, tuple[bool, float]] = {}
        self._was_read = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}"

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._look_for_cuts, name="http cuts", daemon=True).start()

    def close(self) -> None:
        """Accept no more requests, and wait a moment for answers that are being sent."""
        self.shutdown()
        self.server_close()
        until = time.monotonic() + _SECONDS_TO_FINISH
        while self.answering and time.monotonic() < until:
            time.sleep(0.02)
        self._is_closed.set()

    def _look_for_cuts(self) -> None:
        """Call `on_end` for connections whose clients close them while they wait for an answer."""
        while not self._is_closed.wait(_SECONDS_BETWEEN_LOOKS):
            with self.lock:
                answering = {c.fileno(): thread for c, thread in self.answering.items()}
                poll = select.poll()
                for descriptor in answering:
                    poll.register(descriptor, _CLOSED)
                for descriptor, _ in poll.poll(0):
                    self.on_end(answering[descriptor], True, True)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            logger.warning("%d connections are open: refused one more", _MAX_CONNECTIONS)
            self.shutdown_request(request)
            return
        self._wait_for_room()
        self.note_unread(request, has_begun=False)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.note_read(request)
            self._connections.release()

    def note_unread(self, connection: Any, has_begun: bool) -> None:
        with self._was_read:
            self._unread[connection] = has_begun, time.monotonic()

    def is_unread(self, connection: Any) -> bool:
        return connection in self._unread

    def note_read(self, connection: Any) -> None:
        with self._was_read:
            self._unread.pop(connection, None)
            self._was_read.notify_all()

    def _wait_for_room(self) -> None:
        """Wait until a connection may be added to the unread ones; close those that are too slow.

        Connections that have not begun a request are closed first.
        """
        with self._was_read:
            while len(self._unread) >= _MAX_UNREAD:
                before = time.monotonic() - _SECONDS_UNREAD
                late = {c: state for c, state in self._unread.items() if state[1] <= before}
                if not late:
                    oldest = min(since for _, since in self._unread.values())
                    self._was_read.wait(oldest - before)
                    continue
                connection = min(late, key=late.__getitem__)
                del self._unread[connection]
                with contextlib.suppress(OSError):  # it may be closed already
                    connection.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def server_close(self) -> None:
        self.socket.close()  # the base class may wait for idle connections

    def handle_error(self, request: Any, client_address: Any) -> None:
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        logger.log(level, "the connection from %s broke", client_address, exc_info=True)


class _TimedReads(io.RawIOBase):
    """Reads a socket; raises TimeoutError after `until`, even while bytes keep arriving."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.until = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "torchtitan", ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reads = _TimedReads(self.connection)
        self.rfile = io.BufferedReader(self._reads)
        self._seconds_idle, self._is_closed_by_client = _SECONDS_IDLE, False

    def finish(self) -> None:
        super().finish()
        self.server.on_end(threading.get_ident(), self._is_closed_by_client, False)

    def handle_one_request(self) -> None:
        self._reads.until = time.monotonic() + self._seconds_idle
        self._seconds_idle = _SECONDS_KEPT
        self.server.note_unread(self.connection, has_begun=False)
        has_begun = False
        try:
            has_begun = bool(self.rfile.peek(1))
            # Otherwise the server has shut it down, to make room.
            self._is_closed_by_client = not has_begun and self.server.is_unread(self.connection)
        except OSError as error:
            self._is_closed_by_client = not isinstance(error, TimeoutError)
        if not has_begun:
            self.close_connection = True
            return
        self._reads.until = time.monotonic() + _SECONDS_IDLE
        self.server.note_unread(self.connection, has_begun=True)
        super().handle_one_request()

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.answering[self.connection] = threading.get_ident()
        try:
            self._send(self._answer())
        finally:
            with self.server.lock:
                del self.server.answering[self.connection]

    do_POST = do_PUT = do_DELETE = do_GET

    def _answer(self) -> Answer:
        try:
            body = self._body()
            self.server.note_read(self.connection)
            answer = self.server.respond(self.command, self.path.partition("?")[0], body)
            return answer.on_host(f"http://{self.headers['Host']}") if answer.on_host else answer
        except ValueError as error:
            status = error.status if isinstance(error, Refused) else 400
            return Answer({"detail": str(error)}, status)
        except Exception as error:
            logger.exception("%s %s failed", self.command, self.path)
            return Answer({"detail": f"{type(error).__name__}: {error}"}, 500)

    def _body(self) -> bytes:
        """Read the body. Raises Refused, and closes the connection, for a request that is not read."""
        length, limit = self.headers.get("Content-Length", "0"), self.server.max_bytes
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdecimal()):
            self.close_connection = True
            raise Refused("requests need a Content-Length", 411)
        size = int(length[:20])
        try:
            self.server.access.check(self.headers, self.path)
            if size > limit:
                raise Refused(
                    f"requests may have {limit} bytes, got {size}; send less at once, or raise "
                    "rl.serve.max_request_mib",
                    413,
                )
            if self.headers.get("Content-Encoding", "identity") != "identity":
                raise Refused("requests must not be compressed", 415)
        except Refused:
            self.close_connection = True
            if size <= _MAX_BYTES_DROPPED:
                self._read(size)  # closing with unread bytes could discard the answer
            raise
        return self._read(size)

    def _read(self, size: int) -> bytes:
        self._reads.until += _SECONDS_PER_REQUEST - _SECONDS_IDLE
        try:
            body = self.rfile.read(size)
        except TimeoutError as error:
            self.close_connection = True
            raise Refused(
                f"a request must arrive within {_SECONDS_PER_REQUEST} s; send less at once", 408
            ) from error
        if len(body) < size:
            self.close_connection = True
            raise Refused("the request ended early")
        return body

    def _send(self, answer: Answer) -> None:
        body, kind = b"", _BYTES
        if answer.protobuf is not None and _PROTOBUF in self.headers.get("Accept", ""):
            body, kind = answer.protobuf(), _PROTOBUF
        elif answer.write is None:
            values = answer.values() if callable(answer.values) else answer.values
            body, kind = json.dumps(values, allow_nan=False).encode(), _JSON
        try:
            self.connection.settimeout(_SECONDS_PER_REQUEST)
            self.send_response(answer.status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(answer.length or len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if answer.write is not None:
                answer.write(self.wfile)
            else:
                self.wfile.write(body)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s " + format, self.address_string(), *args)
