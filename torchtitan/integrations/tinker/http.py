"""An HTTP/1.1 server on asyncio that limits each client's memory, time and connections.

ASGI servers lack some of these limits: uvicorn waits forever for a client's headers, and hypercorn accepts
any number of connections. Nothing in a request is executed or unpickled.
"""

import asyncio
import contextlib
import contextvars
import hmac
import http.client
import io
import ipaddress
import itertools
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchtitan.integrations.tinker.requests import Answer, Refused
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger

Respond = Callable[[str, str, bytes], Answer]
"""(method, path, body) -> answer; raises ValueError. Called on a thread where `REACHED_AT` is set."""

REACHED_AT = contextvars.ContextVar("REACHED_AT", default="")
"""The URL under which a request's client reached the server."""

_MAX_CONNECTIONS = 512
_MAX_HEADER_BYTES = 2**16
_MAX_BYTES_DROPPED = 2**16  # a refused request's body is read and dropped up to this size
# Timeout for a request's headers; longer than the 10 s between a client's heartbeats.
_SECONDS_IDLE = 15
_SECONDS_PER_REQUEST = 60  # timeout to read a request's body, and to send each part of the answer
_SECONDS_TO_FINISH = 5


@dataclass(frozen=True)
class Access:
    """Rules for the headers of requests.

    names: host names, in lower case, that the header Host may have; IP addresses are always allowed.
        This check blocks web pages that resolve their own name to this machine (DNS rebinding).
    key: the required value of the header X-API-Key; "" disables this check.
    is_signed: returns True for paths that need no key.
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
        except ValueError:
            # ValueError: the host is neither in `names` nor an IP address.
            is_ours = False
        if not is_ours:
            raise Refused(
                f"requests must be for an IP address or one of {', '.join(self.names)}, got Host "
                f"{host[:200]!r}; add the name to rl.serve.names if it is this server's",
                403,
            )
        has_key = hmac.compare_digest(headers.get("X-API-Key", "").encode(), self.key.encode())
        if self.key and not has_key and not self.is_signed(path):
            remedy = "set TINKER_API_KEY to the key in the server's rl.serve.api_key_file"
            raise Refused(f"the header X-API-Key is missing or wrong; {remedy}", 401)


class HttpServer:
    """Serves on its own thread from `start` to `close`.

    port: 0 chooses a free port. max_bytes: limit for a request's body.
    Raises OSError if it cannot listen at the address.
    """

    def __init__(self, host: str, port: int, max_bytes: int, access: Access, respond: Respond):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{self.host}]' if ':' in host else self.host}:{self.port}"
        self._max_bytes, self._access, self._respond = max_bytes, access, respond
        self._open: set[asyncio.StreamWriter] = set()
        # Connections that have not sent a complete request, longest waiting first.
        self._unread: dict[asyncio.StreamWriter, None] = {}
        # A request for a result that is not finished blocks its thread for up to 20 s.
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, "http")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="http", daemon=True
        )
        self.start = self._thread.start

    def close(self) -> None:
        """Accept no more requests, and wait a few seconds for answers that are being sent."""
        self._is_closed.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _SECONDS_TO_FINISH)
        self._socket.close()
        self._pool.shutdown(wait=False)

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connection, sock=self._socket, limit=_MAX_HEADER_BYTES
        )
        while not self._is_closed.is_set():
            await asyncio.sleep(0.1)
        server.close()
        until = time.monotonic() + _SECONDS_TO_FINISH
        # Connections with a complete request are being answered.
        while len(self._open) > len(self._unread) and time.monotonic() < until:
            await asyncio.sleep(0.02)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        if len(self._open) > _MAX_CONNECTIONS:
            logger.warning("%d connections are open: closed one of them", _MAX_CONNECTIONS)
            closed = next(iter(self._unread), writer)
            self._unread.pop(closed, None)
            closed.transport.abort()
        # With a limit of 0, `drain` waits until every byte is sent.
        writer.transport.set_write_buffer_limits(0)
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        except Exception:
            logger.exception("serving a connection failed")
        finally:
            self._open.discard(writer)
            self._unread.pop(writer, None)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Returns True if the connection stays open for another request."""
        self._unread[writer] = self._unread.pop(writer, None)
        try:
            method, path, headers, body = await self._read(reader)
        except Refused as error:
            await self._send(writer, Answer({"detail": str(error)}, error.status), keeps=False)
            return False
        self._unread.pop(writer, None)
        keeps = headers.get("Connection", "").lower() != "close"
        REACHED_AT.set(f"http://{headers['Host']}")
        run, call = contextvars.copy_context().run, (self._answer, method, path, body)
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, run, *call)
        await self._send(writer, answer, keeps)
        return keeps

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, Any, bytes]:
        """Return method, path, headers and body. Raises Refused for a request that breaks a rule."""
        try:
            async with asyncio.timeout(_SECONDS_IDLE):
                head = await reader.readuntil(b"\r\n\r\n")
            line, _, fields = head.partition(b"\r\n")
            method, path, _ = line.decode("latin-1").split(" ")
            headers = http.client.parse_headers(io.BytesIO(fields))
        except (ValueError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
            raise Refused(f"the request is not HTTP/1.1 with short headers: {error}") from error
        length = headers.get("Content-Length", "0")
        if headers.get("Transfer-Encoding") or not (length.isascii() and length.isdecimal()):
            raise Refused("requests need a Content-Length", 411)
        size = int(length[:20])

        async def read_body() -> bytes:
            try:
                async with asyncio.timeout(_SECONDS_PER_REQUEST):
                    return await reader.readexactly(size)
            except TimeoutError as error:
                limit = f"within {_SECONDS_PER_REQUEST} s; send less at once"
                raise Refused(f"a request must arrive {limit}", 408) from error

        try:
            self._access.check(headers, path)
            if size > self._max_bytes:
                got = f"got {size}; send less at once, or raise rl.serve.max_request_mib"
                raise Refused(f"requests may have at most {self._max_bytes} bytes, {got}", 413)
            if headers.get("Content-Encoding", "identity") != "identity":
                raise Refused("requests must not be compressed", 415)
        except Refused:
            # Read the body first: closing with unread bytes would lose the answer.
            if size <= _MAX_BYTES_DROPPED:
                await read_body()
            raise
        return method, path, headers, await read_body()

    def _answer(self, method: str, path: str, body: bytes) -> Answer:
        try:
            return self._respond(method, path.partition("?")[0], body)
        except ValueError as error:
            status = error.status if isinstance(error, Refused) else 400
            return Answer({"detail": str(error)}, status)
        except Exception as error:
            logger.exception("%s %s failed", method, path)
            return Answer({"detail": f"{type(error).__name__}: {error}"}, 500)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer, keeps: bool) -> None:
        with contextlib.ExitStack() as stack:
            if answer.file is not None:
                file, kind = stack.enter_context(open_file(answer.file, "rb")), "octet-stream"
                size = os.fstat(file.fileno()).st_size
                parts = iter(lambda: file.read(2**20), b"")
            elif answer.protobuf is not None:
                parts, size, kind = iter([answer.protobuf]), len(answer.protobuf), "x-protobuf"
            else:
                body = json.dumps(answer.values, allow_nan=False).encode()
                parts, size, kind = iter([body]), len(body), "json"
            head = (
                f"HTTP/1.1 {answer.status} {http.client.responses[answer.status]}\r\n"
                f"Content-Type: application/{kind}\r\nContent-Length: {size}\r\n"
                f"Connection: {'keep-alive' if keeps else 'close'}\r\n\r\n"
            )
            # Send head and body in one write: a second small write may wait 40 ms for an acknowledgement.
            for part in itertools.chain([head.encode() + next(parts, b"")], parts):
                async with asyncio.timeout(_SECONDS_PER_REQUEST):
                    writer.write(part)
                    await writer.drain()
