"""Reward functions that don't do what a reward function should."""

import os
import sys


def raises(text: str, answer: str) -> float:
    return len(text) / len(answer)  # the answers of the fault book's prompts are empty


def exits(_text: str, _answer: str) -> float:
    sys.exit(0)


def returns_nan(_text: str, _answer: str) -> float:
    return float("nan")


def takes_one(_text: str) -> float:
    return 1.0


def raises_on_rank_one(text: str, answer: str) -> float:
    return raises(text, answer) if os.environ["RANK"] == "1" else 1.0


def good(text: str, _answer: str) -> float:
    return float(len(text))


def tool_without_a_name() -> str:
    return "done"


tool_without_a_name.schema = {"type": "function", "function": {}}  # type: ignore[attr-defined]

not_a_function = 3
