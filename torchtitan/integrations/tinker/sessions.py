"""Sessions of client programs, and when such a program has ended without a word."""

import threading
import time
import uuid
from dataclasses import dataclass, field

from torchtitan.integrations.tinker.http import CALLER
from torchtitan.integrations.tinker.requests import Refused

SECONDS_UNTIL_GONE = 30  # without a heartbeat, which clients send every 10 s
_SECONDS_AFTER_CLOSING = 12  # of all its connections, until a session's next heartbeat
MAX_SESSIONS = 4096


@dataclass
class _Session:
    """alive_until: if no request comes. is_closing: its client has closed all connections. was_cut: one
    of them while it waited for an answer, which programs do when they end."""

    alive_until: float = 0.0
    connections: set[int] = field(default_factory=set)
    is_closing: bool = False
    was_cut: bool = False


class Sessions:
    """The sessions that are not finished.

    A session lives until it is silent for too long. If its client's connections end, that is soon.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all: dict[str, _Session] = {}

    def create(self) -> str:
        session_id = str(uuid.uuid4())
        with self._lock:
            self._all = {k: session for k, session in self._all.items() if self.is_alive(k)}
            if len(self._all) >= MAX_SESSIONS:
                raise Refused(f"{MAX_SESSIONS} sessions are alive; finish some of them", 429)
            self._all[session_id] = _Session()
            self.note(session_id)
        return session_id

    def check(self, session_id: str) -> None:
        """Note a request of a session; raise Refused for an unknown session."""
        if not self.note(session_id):
            raise Refused(
                f"session {session_id} is unknown or finished; make a new ServiceClient", 410
            )

    def _of(self, id_in_session: str) -> _Session | None:
        return self._all.get(id_in_session.partition(":")[0])

    def note(self, id_in_session: str) -> bool:
        """Note a request for a session's model, sampler or result; return False for an unknown session."""
        with self._lock:
            if (session := self._of(id_in_session)) is None:
                return False
            session.alive_until = time.monotonic() + SECONDS_UNTIL_GONE
            session.connections.add(CALLER.get().connection)
            session.is_closing = session.was_cut = False
            return True

    def connection_ended(self, connection: int, is_closed_by_client: bool, is_cut: bool) -> None:
        """See `http.OnEnd`. A client that lives may close idle connections, and then open others."""
        with self._lock:
            for session in self._all.values():
                if connection not in session.connections:
                    continue
                session.connections.remove(connection)
                session.was_cut |= is_cut
                if is_closed_by_client and not session.connections:
                    session.is_closing = True
                    seconds = 0 if session.was_cut else _SECONDS_AFTER_CLOSING
                    until = time.monotonic() + seconds
                    session.alive_until = min(session.alive_until, until)

    def is_alive(self, id_in_session: str) -> bool:
        session = self._of(id_in_session)
        return session is not None and time.monotonic() < session.alive_until

    def has_client(self, id_in_session: str) -> bool:
        """Return False if the session's client has closed its connections, and has not come back."""
        session = self._of(id_in_session)
        return session is None or not session.is_closing or self.is_alive(id_in_session)

    def finish(self, session_id: str) -> None:
        with self._lock:
            self.check(session_id)
            del self._all[session_id]
