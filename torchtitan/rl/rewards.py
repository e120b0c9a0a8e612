"""What a reward function returns, and reward functions for `rl.task.reward_fn`."""

import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

# Squares, sums and fp32 products of larger rewards would overflow.
LARGEST_REWARD = 1e18

# Key of the reward in a dict of scores.
TOTAL = "total"

# GSM8K's last line: "#### 1,200". A number may have a sign before or after a dollar sign, thousands
# in groups of three, and decimals; text after it, such as a unit, is ignored.
_SIGN = "[-+\N{MINUS SIGN}]?"
_ANSWER = re.compile(
    rf"####[ \t]*({_SIGN}\$?{_SIGN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)?(?:\.\d+)?)(?![\d,.]*\d)",
    re.ASCII,
)


def scores_of(value: Any) -> dict[str, float]:
    """Convert a reward function's result to a dict {"total": reward, name of another score: score, ...}.

    value: the reward, or a dict with the reward under "total". A number is any value
    that float() accepts, except a string: a bool, a Decimal, or a scalar of NumPy or torch.
    Raises ValueError, naming the key, for a dict without "total" and for numbers that are not finite.
    """
    if not isinstance(value, Mapping):
        if (reward := _number(value)) is None:
            raise ValueError(
                "the reward function must return a finite number, at most "
                f"{LARGEST_REWARD:g} in size, or a dict of such numbers, got {value!r}"
            )
        return {TOTAL: reward}
    if TOTAL not in value:
        raise ValueError(
            f"a dict from the reward function must have the reward under {TOTAL!r}, got the keys "
            f"{', '.join(map(repr, value)) or 'of an empty dict'}"
        )
    scores = {}
    for name, score in value.items():
        if not isinstance(name, str):
            raise ValueError(f"the reward function's dict must have strings as keys, got {name!r}")
        if (number := _number(score)) is None:
            raise ValueError(
                f"the reward function's score {name!r} must be a finite number, at most "
                f"{LARGEST_REWARD:g} in size, got {score!r}"
            )
        scores[name] = number
    return scores


def _number(value: Any) -> float | None:
    if not isinstance(value, str | bytes | bytearray):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
            return number if abs(number) <= LARGEST_REWARD else None
    return None


def plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch as a Python number, for JSON; other values unchanged."""
    return value.item() if hasattr(value, "item") else value


def gsm8k_answer(text: str) -> Decimal | None:
    """Return the number after the last "####" of a text; None if there is none.

    "#### $1,200.50 in all" is 1200.5. "#### 1,2" and "#### 1.2.3" are not numbers.
    """
    start = text.rfind("####")
    match = _ANSWER.match(text, start) if start >= 0 else None
    if match is None:
        return None
    number = match[1].replace(",", "").replace("$", "").replace("\N{MINUS SIGN}", "-")
    return Decimal(number) if re.fullmatch(r"[-+]?(\d+(\.\d+)?|\.\d+)", number) else None


def gsm8k(completion: str, answer: str) -> float:
    """Return 1 if a completion ends in the answer's number in GSM8K's form, "#### 42"; else 0.

    Numbers are compared by value: 1,200 equals 1200.00. Raises ValueError if the expected
    answer has no number after "####".
    """
    expected = gsm8k_answer(answer)
    if expected is None:
        raise ValueError(
            f"torchtitan.rl.rewards:gsm8k compares the number after '####', got the expected answer "
            f"{answer!r} without one; correct the data, or rl.task.answer_key"
        )
    return float(gsm8k_answer(completion) == expected)
