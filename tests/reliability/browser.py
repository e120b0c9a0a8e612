"""A headless Chromium, driven over its debugging pipe; nothing besides the browser is needed."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)
_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
]


class Page:
    """One page. errors: exceptions of its scripts, and what its policy or the network refused."""

    def __init__(self, send_to: int, read_from: int) -> None:
        self._send_to, self._read_from = send_to, read_from
        self._unread, self._session, self._num_sent = b"", None, 0
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self._num_sent += 1
        message: dict[str, Any] = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send_to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next_message(self, timeout_seconds: float = 30) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._read_from], [], [], timeout_seconds)[0], "no answer"
            chunk = os.read(self._read_from, 1 << 16)
            assert chunk, "the browser has gone"
            self._unread += chunk
        line, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(entry["text"])
        return message

    def open(self, path: Path, width: int = 1180) -> None:
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 20
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """kind: mouseMoved, mousePressed or mouseReleased, at this place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own. profile: an empty folder for its files."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    # It reads commands from descriptor 3 and writes to 4, whatever ours are called.
    shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=[to_browser, from_browser],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(from_us, to_us)
    finally:
        process.kill()
        process.wait()
        os.close(from_us)
        os.close(to_us)
