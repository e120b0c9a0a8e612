"""Tools for tests, which other processes import."""

import os
import time


def divide(x: float, y: float = 2.0) -> dict:
    """Divide x by y."""
    return {"quotient": x / y}


def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def die() -> str:
    os._exit(3)


def untyped(x) -> str:
    return x
