"""Reward functions for `rl.task.reward_fn`."""

import re
from decimal import Decimal

# GSM8K's last line: "#### 1,200". A number may have a sign before or after a dollar sign, thousands
# in groups of three, and decimals; text after it, such as a unit, is ignored.
_SIGN = "[-+\N{MINUS SIGN}]?"
_ANSWER = re.compile(
    rf"####[ \t]*({_SIGN}\$?{_SIGN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)?(?:\.\d+)?)(?![\d,.]*\d)",
    re.ASCII,
)


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

    Numbers are compared by value: 1,200 equals 1200.00. Raises ValueError if the answer itself,
    from the data, has no such line.
    """
    expected = gsm8k_answer(answer)
    if expected is None:
        raise ValueError(
            f"torchtitan.rl.rewards:gsm8k compares the number after '####', got the expected answer "
            f"{answer!r} without one; correct the data, or rl.task.answer_key"
        )
    return float(gsm8k_answer(completion) == expected)
