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


def in_parts(completion, answer, *, row):
    """Return a dict of scores, of which the data may replace some; the completion "hang" never ends."""
    if completion == "hang":
        time.sleep(600)
    scores = {"total": 0.25 * len(completion), "format": float(completion == answer)}
    scores |= {key: float(x) if x == "nan" else x for key, x in row.get("more", {}).items()}
    return {key: x for key, x in scores.items() if key != row.get("without")}
