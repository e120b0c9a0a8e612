"""Messages between the ranks of a job, beside training: configs, data records and failures.

For `torchtitan.train.main`. When a rank dies, collectives on the other ranks fail late or never,
and without the reason. Here every rank learns the reason within seconds.
"""

import ipaddress
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import torchtitan
from torchtitan.config.job_config import Comm
from torchtitan.distributed.processes.late_ranks import (
    SECONDS_BETWEEN_TURNS,
    LateRanks,
    Progress,
    State,
    own_state,
)
from torchtitan.tools.admission import SECRET_BYTES, admit, digest_of
from torchtitan.tools.errors import RunError
from torchtitan.tools.events import flat_settings
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import run_beside

# Settings that may differ between ranks: names, and paths, because each machine may have its own disk.
_SETTINGS_PER_RANK = set(
    """
    job.config_file job.description job.dump_folder job.print_config job.save_config_file
    model.hf_assets_path model.hf_config model.tokenizer_path
    training.dataset_path validation.dataset_path
    comm.save_traces_folder comm.save_traces_file_prefix fault_tolerance.replica_id
    """.split()
)
_MOST_KEYS_SHOWN = 8
# Kinds of messages. _FAILED is followed by a line of JSON, [rank, text]. _HERE answers _WHERE, and is
# followed by a `State`.
_ALIVE, _LEAVES, _FAILED, _WHERE, _HERE = b"a", b"l", b"f", b"w", b"h"
# In bytes.
_LONGEST_MESSAGE = 2**20
# How long a rank that can't train waits for other ranks' reports, and rank 0 for the verdict to be read.
SECONDS_TO_REPORT = 15
# After a helper fails, the other ranks may save. torchrun kills ranks 30 s after SIGTERM.
_SECONDS_TO_SAVE = 25
# After another rank fails, the main thread has this long to end this process.
_SECONDS_TO_END = 2
# A failed rank 0 waits this long for starting ranks to connect, to tell them of its failure.
_SECONDS_TO_CONNECT = 5
# After its own failure, a rank has this long to close its resources.
_SECONDS_TO_CLOSE = 10


class PeerError(Exception):
    """A rank's config cannot run, or the ranks' configs or data differ; rank 0 has printed the reason."""


class Peers:
    """This rank's connection to the job's other ranks; every rank makes it before anything else.

    Every rank is connected to rank 0, which forwards failures. If a connection ends without a message,
    its rank was killed. If a connection is silent for the store's timeout (at least a minute), its rank was
    stopped, because a thread of every rank sends messages regularly, even while the main thread hangs.

    Each rank publishes only the digest of its secret in the store, and rank 0 admits each secret once, so a
    program that reads the store or finds the port cannot pass for a rank. A program that can write to
    torch's store at MASTER_PORT can end the job, so keep the ports of a job's machines closed to others.

    helpers: ranks without which the other ranks can save; when a helper fails, the other ranks have
        longer to save and end.
    Raises RunError if another process has this rank's number.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, helpers: range = range(0)
    ) -> None:
        self._helpers = helpers
        self._store = dist.PrefixStore("torchtitan_peers", store)
        self.rank, self.world_size = rank, world_size
        # Connection -> the rank at its other end.
        self._connections: dict[socket.socket, int] = {}
        # Rank -> time of its last message.
        self._heard_at: dict[int, float] = {}
        # epoll and kqueue let a thread add a connection while `_watch` waits in `select`.
        self._selector = selectors.DefaultSelector()
        # Set on rank 0 once all ranks have connected.
        self._all_came = threading.Event()
        self._leaving = threading.Event()
        self._first_failure: tuple[int, str] | None = None
        self._has_failed = threading.Event()
        self._progress: Progress | None = None
        # Exists on rank 0 during training.
        self._late: LateRanks | None = None
        if world_size > 1:
            self._connect()

    # ---- before training ----

    def compare(self, config: dict[str, Any] | None, error: str | None = None) -> None:
        """Compare this rank's config, or its error in reading the config, with all other ranks'.

        Raises PeerError on every rank if any rank has an error, or if configs or the versions of this
        package differ; rank 0 prints the reason, unless it is rank 0's own error. Raises
        DistStoreError if a rank does not report in time.
        """
        settings = flat_settings(config) | {"the version of torchtitan": torchtitan.__version__}
        self._agree(self._store, self.world_size, settings, error)

    def compare_data(self, record: dict[str, Any]) -> None:
        """Raise PeerError on all trainers if their records of the data (`run_record`) differ."""
        num_trainers = self._helpers.start if self._helpers else self.world_size
        if self.rank < num_trainers:
            self._agree(dist.PrefixStore("data", self._store), num_trainers, record)

    def _agree(
        self, store: dist.Store, num_ranks: int, settings: dict[str, Any], error: str | None = None
    ) -> None:
        config = {k: v for k, v in settings.items() if k not in _SETTINGS_PER_RANK}
        own = json.dumps({"error": error, "config": config}, default=str)
        store.set(f"config_{self.rank}", own)
        if self.rank == 0:
            names = [f"config_{rank}" for rank in range(num_ranks)]
            store.wait(names, self._store.timeout)
            problem = _problem_of([json.loads(text) for text in store.multi_get(names)])
            if problem:
                # From now on, ignore lost connections: other ranks end when they have read the verdict.
                self._leaving.set()
            store.set("verdict", json.dumps(problem))
        problem = json.loads(store.get("verdict"))
        if self.rank > 0:
            if problem:
                self.leave()
            store.set(f"read_{self.rank}", "")
        elif problem and problem != error:
            print(problem, file=sys.stderr, flush=True)
        if self.rank == 0 and num_ranks > 1:
            # This process may hold the store, so wait until all ranks have read the verdict.
            readers = [f"read_{rank}" for rank in range(1, num_ranks)]
            with suppress(dist.DistStoreError):
                store.wait(readers, timedelta(seconds=SECONDS_TO_REPORT))
        if problem:
            raise PeerError(problem)

    def watch(self, comm: Comm, progress: Progress | None) -> None:
        """From now on, rank 0 logs which ranks are late, unless `progress` is None."""
        self._progress = progress
        if progress is not None and self.rank == 0:
            self._late = LateRanks(comm, progress, self.world_size, lambda: self._send(_WHERE))

    # ---- from the start on ----

    def _connect(self) -> None:
        if self.rank == 0:
            names = [f"digest_{rank}" for rank in range(1, self.world_size)]
            self._store.wait(names, self._store.timeout)
            digests = [digest.decode() for digest in self._store.multi_get(names)]
            expected = {digest: rank for rank, digest in enumerate(digests, 1)}
            server = _listen()
            self._store.set("port", str(server.getsockname()[1]))
            self._start(lambda: self._admit(server, expected))
        else:
            secret = secrets.token_bytes(SECRET_BYTES)
            digest = digest_of(secret)
            if self._store.compare_set(f"digest_{self.rank}", "", digest).decode() != digest:
                raise RunError(
                    f"two processes have RANK = {self.rank}; give each rank its own number"
                )
            address = os.environ["MASTER_ADDR"], int(self._store.get("port"))
            try:
                connection = socket.create_connection(address, timeout=10)
            except OSError as error:
                logger.warning(
                    f"rank {self.rank} cannot connect to rank 0 at {address} ({error}): the death of a "
                    "rank is noticed only when a collective times out"
                )
                return
            connection.sendall(secret)
            self._add(0, connection)
        self._start(self._watch)

    def _start(self, work: Callable[[], None]) -> None:
        """Run `work`, which watches other ranks, on a thread. If it fails, report this rank as failed."""

        def ended(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                logger.error("watching the other ranks ended with an error", exc_info=error)
                self._fail(self.rank, f"its watch of other ranks failed: {error!r}")

        run_beside(work).add_done_callback(ended)

    def _admit(self, server: socket.socket, expected: dict[str, int]) -> None:
        for rank, connection in admit(server, expected):
            self._add(rank, connection)
            # Tell the new rank of an earlier failure.
            if self._first_failure is not None:
                self._send(_FAILED, self._first_failure)
        self._all_came.set()

    def _add(self, rank: int, connection: socket.socket) -> None:
        # The kernel closes the connection within 20 s if the other machine is gone.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # Timeout to receive the rest of a message.
        connection.settimeout(_SECONDS_TO_END)
        self._connections[connection], self._heard_at[rank] = rank, time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _watch(self) -> None:
        longest_silence = _longest_silence(self._store.timeout)
        seconds_between_turns = SECONDS_BETWEEN_TURNS if self.rank == 0 else longest_silence / 8
        next_message_at = last_turn = time.monotonic()
        while True:
            ready = self._selector.select(seconds_between_turns)
            now = time.monotonic()
            # If this process was suspended, restart the time of each rank's silence.
            if now - last_turn > longest_silence / 2:
                self._heard_at.update(dict.fromkeys(list(self._heard_at), now))
            last_turn = now
            if now >= next_message_at:
                next_message_at = now + longest_silence / 4
                self._send(_ALIVE)
            for key, _ in ready:
                self._read(key.fileobj)
            for rank in list(self._connections.values()):
                if now - self._heard_at[rank] > longest_silence:
                    silent = f"silent for {longest_silence:.0f} s"
                    self._fail(rank, f"it was stopped, or its machine hangs: {silent}")
            if self._late is not None and not self._leaving.is_set():
                self._late.turn(now)

    def _read(self, connection: socket.socket) -> None:
        """Handle one message of a rank, or the end of its connection, which is a failure."""
        rank, problem = self._connections[connection], ""
        self._heard_at[rank] = time.monotonic()
        try:
            kind = connection.recv(1)
            if kind == _ALIVE:
                return
            if kind == _WHERE:
                return self._send(_HERE, own_state(self._progress))
            if kind in (_HERE, _FAILED):  # unbuffered, so that nothing of the next message is read
                line = json.loads(connection.makefile("rb", 0).readline(_LONGEST_MESSAGE))
                if kind == _FAILED:
                    return self._fail(int(line[0]), str(line[1]))
                if self._late is not None:
                    self._late.answers[rank] = State(dict(line[0]), *map(str, line[1:]))
                return
            if kind not in (_LEAVES, b""):
                raise ValueError(kind)
        except (TimeoutError, ValueError, TypeError, LookupError, RecursionError) as error:
            problem = f"it sent a message that no rank sends: {error!r}"
        except OSError:
            kind = b""
        self._selector.unregister(connection)
        del self._connections[connection]
        connection.close()
        if kind != _LEAVES:
            self._fail(rank, problem)

    def _fail(self, rank: int, message: str) -> None:
        """Record the first failure, forward it, and end this process if the main thread doesn't."""
        if self._first_failure is not None or self._leaving.is_set():
            return
        self._first_failure = rank, message
        if self.rank in (0, rank):
            # Send before the main thread learns of the failure, because it may then end this process.
            self._send(_FAILED, self._first_failure)
        self._has_failed.set()
        may_save = rank in self._helpers and self.rank not in self._helpers
        if not self._leaving.wait(_SECONDS_TO_SAVE if may_save else _SECONDS_TO_END):
            print(f"error: {self.describe_failure()}", file=sys.stderr, flush=True)
            os._exit(1)

    def describe_failure(self, wait_seconds: float = 0) -> str:
        """Return another rank's failure in one line, for this rank to print."""
        own = f"rank {self.rank}"
        if not self._has_failed.wait(wait_seconds) or self._first_failure is None:
            return f"{own} lost its connection to another rank; the first error is in that rank's output"
        rank, message = self._first_failure
        if message:
            return f"{own} ends because rank {rank} failed: {message}"
        return (
            f"{own} ends because rank {rank} ended without a message; if its output has no error "
            "either, it was killed: look for the kernel's out-of-memory killer on its node"
        )

    def report(self, message: str) -> None:
        """Tell all ranks that this rank failed; this process ends soon, even if closing hangs."""
        self._leaving.set()
        if self._first_failure is None:
            self._first_failure = self.rank, message.partition("\n")[0][:2000]
            self._send(_FAILED, self._first_failure)
        if self.rank == 0:
            self._all_came.wait(_SECONDS_TO_CONNECT)
        timer = threading.Timer(_SECONDS_TO_CLOSE, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def leave(self) -> None:
        """Announce to the other ranks that this rank ends without a failure."""
        self._leaving.set()
        self._send(_LEAVES)

    def _send(self, kind: bytes, content: tuple[Any, ...] | None = None) -> None:
        message = kind + (json.dumps(content).encode() + b"\n" if content else b"")
        for connection in list(self._connections):
            with suppress(OSError):
                connection.sendall(message)


def _problem_of(reports: list[dict[str, Any]]) -> str | None:
    """Return the reason why the ranks cannot train together, or None. reports: one per rank."""
    ranks_of: dict[str | None, list[int]] = {}
    for rank, own in enumerate(reports):
        ranks_of.setdefault(own["error"], []).append(rank)
    if len(ranks_of) == 1 and reports[0]["error"] is not None:
        return reports[0]["error"]
    if ranks_of.keys() != {None}:
        return "\n".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {error}"
            for error, ranks in ranks_of.items()
            if error is not None
        )
    first = reports[0]["config"]
    lines = [
        f"{key} is {first.get(key)!r} on rank 0 and {own['config'].get(key)!r} on rank {rank}"
        for rank, own in enumerate(reports)
        for key in sorted(first.keys() | own["config"].keys())
        if repr(first.get(key)) != repr(own["config"].get(key))  # repr, so that nan equals nan
    ]
    if not lines:
        return None
    more = f"; and {len(lines) - _MOST_KEYS_SHOWN} more" if len(lines) > _MOST_KEYS_SHOWN else ""
    return (
        f"config error: the ranks disagree: {'; '.join(lines[:_MOST_KEYS_SHOWN])}{more}. Start all "
        "ranks with the same config, files and version"
    )


def _longest_silence(timeout: timedelta) -> float:
    return max(60.0, timeout.total_seconds())


def _listen() -> socket.socket:
    """Listen on a free port of MASTER_ADDR's interface, or of all interfaces if that interface is unknown.

    It is unknown if some ranks are on other machines and MASTER_ADDR is a name that resolves to a loopback
    address, such as the 127.0.1.1 that /etc/hosts may have for the machine's own name.
    """
    name = os.environ["MASTER_ADDR"]
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    with suppress(OSError):
        places = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        family, *_, (address, *_) = min(places, key=lambda place: place[0] != socket.AF_INET)
        is_loopback = ipaddress.ip_address(address).is_loopback
        if is_local or not is_loopback or name in ("localhost", address):
            return socket.create_server((address, 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
