"""Sessions of client programs. A session ends when its program says so, or is silent for too long."""

import threading
import time
import uuid

from torchtitan.integrations.tinker.requests import Refused

SECONDS_UNTIL_GONE = 20  # without a request; clients send a heartbeat every 10 s
MAX_SESSIONS = 4096


class Sessions:
    """The sessions that are not finished. A model, a sampler and a result have their session's id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive_until: dict[str, float] = {}  # if no request comes

    def create(self) -> str:
        session_id, now = str(uuid.uuid4()), time.monotonic()
        with self._lock:
            self._alive_until = {k: until for k, until in self._alive_until.items() if now < until}
            if len(self._alive_until) >= MAX_SESSIONS:
                raise Refused(f"{MAX_SESSIONS} sessions are alive; finish some of them", 429)
            self._alive_until[session_id] = now + SECONDS_UNTIL_GONE
        return session_id

    def note(self, id_in_session: str) -> bool:
        """Note a request, which keeps its session alive; return False for an unknown session."""
        session_id = id_in_session.partition(":")[0]
        with self._lock:
            if is_known := session_id in self._alive_until:
                self._alive_until[session_id] = time.monotonic() + SECONDS_UNTIL_GONE
        return is_known

    def check(self, session_id: str) -> None:
        """Note a request of a session; raise Refused for an unknown session."""
        if not self.note(session_id):
            raise Refused(
                f"session {session_id} is unknown or finished; make a new ServiceClient", 410
            )

    def seconds_left(self, id_in_session: str) -> float:
        """Return after how long the session will have ended if no request comes; 0 if it has ended."""
        until = self._alive_until.get(id_in_session.partition(":")[0], 0.0)
        return max(0.0, until - time.monotonic())

    def is_alive(self, id_in_session: str) -> bool:
        return self.seconds_left(id_in_session) > 0

    def finish(self, session_id: str) -> None:
        self.check(session_id)
        with self._lock:
            self._alive_until.pop(session_id, None)
