"""Reward functions for tests, which other processes import."""

import os
import time


def fancy(completion, answer, *, prompt, row):
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(3)
    if completion == "exit":
        raise SystemExit("enough")
    if completion == "raise":
        raise KeyError("no such key")
    assert prompt == row["prompt"]
    return row["scale"] * (completion == answer)
