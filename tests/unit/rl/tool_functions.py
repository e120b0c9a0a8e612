"""Tools for tests, which other processes import."""

import os
import threading
import time


def divide(x: float, y: float = 2.0) -> dict:
    """Divide x by y."""
    return {"quotient": x / y}


def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def die() -> str:
    os._exit(3)


def echo(x: list) -> str:
    return x if isinstance(x, str) else "a list"


def hide() -> str:
    """Closes the pipe that its result would take."""
    os.closerange(3, 256)
    time.sleep(60)


def die_while_answering() -> str:
    threading.Timer(0.5, lambda: os._exit(3)).start()
    return "y" * 10_000_000


def untyped(x) -> str:
    return x
