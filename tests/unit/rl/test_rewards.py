from decimal import Decimal

import pytest

from torchtitan.rl.rewards import gsm8k, gsm8k_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3+4=7\n#### 7", "7"),
        ("#### 1,200", "1200"),
        ("#### 12,345,678.90", "12345678.9"),
        ("#### .5", "0.5"),
        ("#### -3", "-3"),
        ("#### +3", "3"),
        ("#### \N{MINUS SIGN}3", "-3"),
        ("#### $5", "5"),
        ("#### $-5", "-5"),
        ("#### 42.", "42"),
        ("#### 42, as she said", "42"),
        ("#### 7\nNo, wait.\n#### 8", "8"),
    ],
)
def test_answer_is_the_number_after_the_last_mark(text, number):
    assert gsm8k_answer(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    ["", "7", "####", "#### seven", "####\n7", "#### 1,2", "#### 1,2000", "#### 1.2.3", "#### --5"]
    + ["#### -$-5", "#### 7\n#### ", "### 7", "#### \u0667"],
)
def test_what_is_no_number_is_no_answer(text):
    assert gsm8k_answer(text) is None


def test_reward_compares_numbers_not_spellings():
    answer = "600*2=<<600*2=1200>>1200\n#### 1,200"
    assert gsm8k("It is 1200.\n#### 1200.0", answer) == 1.0
    assert gsm8k("It is 1200.", answer) == 0.0
    assert gsm8k("#### 120", answer) == 0.0
    assert gsm8k("#### -1200", answer) == 0.0
    with pytest.raises(ValueError, match="got the expected answer '1200' without one"):
        gsm8k("#### 1200", "1200")
