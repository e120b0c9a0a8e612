"""The HTTP side of the server: Python's own server, with bounds on what a client can make it hold.

Nothing of a request is executed or unpickled: it is JSON, or the protobuf messages of `wire`.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchtitan.rl.serving.requests import Refused
from torchtitan.rl.serving.results import Answer
from torchtitan.tools.logging import logger

Respond = Callable[[str, str, bytes, bool], Answer]
"""(method, path, body, whether the client reads protobuf) -> answer; raises ValueError"""

_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_MOST_CONNECTIONS = 512
_SECONDS_IDLE = 120  # a connection that sends nothing, or reads nothing
_SECONDS_TO_FINISH = 5


class HttpServer(ThreadingHTTPServer):
    """Serves on a thread of its own from `start` to `close`.

    port: 0 takes a free one. max_bytes: of a request's body.
    Raises OSError if it cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, max_bytes: int, respond: Respond):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.max_bytes, self.respond = max_bytes, respond
        self.n_answering = 0
        self.lock = threading.Lock()
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, name="http", daemon=True)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take no more requests, and let those that are being answered end."""
        self.shutdown()
        self.server_close()
        until = time.monotonic() + _SECONDS_TO_FINISH
        while self.n_answering and time.monotonic() < until:
            time.sleep(0.02)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            logger.warning("%d connections are open: another one is refused", _MOST_CONNECTIONS)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def server_close(self) -> None:
        self.socket.close()  # not waiting for idle connections, as the base class may

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection of %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "torchtitan", ""
    timeout = _SECONDS_IDLE
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.n_answering += 1
        try:
            self._send(self._answer())
        finally:
            with self.server.lock:
                self.server.n_answering -= 1

    do_POST = do_PUT = do_DELETE = do_GET

    def _answer(self) -> Answer:
        try:
            body = self._body()
            if self.headers.get("Origin") is not None:
                raise Refused("requests from web pages are not answered", 403)
            accepts_protobuf = _PROTOBUF in self.headers.get("Accept", "")
            path = self.path.partition("?")[0]
            return self.server.respond(self.command, path, body, accepts_protobuf)
        except ValueError as error:
            status = error.status if isinstance(error, Refused) else 400
            return Answer({"detail": str(error)}, status)
        except Exception as error:
            logger.exception("%s %s failed", self.command, self.path)
            return Answer({"detail": f"{type(error).__name__}: {error}"}, 500)

    def _body(self) -> bytes:
        """Raises Refused, after which the connection is closed, for one that is not read."""
        length, limit = self.headers.get("Content-Length", "0"), self.server.max_bytes
        problem = None
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdecimal()):
            problem = "requests need a Content-Length", 411
        elif int(length) > limit:
            problem = (
                f"requests may have {limit} bytes, got {length}; send less at once, or raise "
                "rl.serve.max_request_mib",
                413,
            )
        elif self.headers.get("Content-Encoding", "identity") != "identity":
            problem = "requests are not compressed", 415
        if problem is not None:
            self.close_connection = True
            raise Refused(*problem)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise Refused("the request ended early")
        return body

    def _send(self, answer: Answer) -> None:
        is_json = answer.body is None
        body = json.dumps(answer.values).encode() if is_json else answer.body or b""
        try:
            self.send_response(answer.status)
            self.send_header("Content-Type", _JSON if is_json else _PROTOBUF)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s " + format, self.address_string(), *args)
