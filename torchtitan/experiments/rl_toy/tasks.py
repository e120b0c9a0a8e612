"""Toy tasks that are spelled in characters: sums, copying, sorting, guessing a number."""

import random
import string
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.rl.tasks import Grade, Prompt, Task, Turn


class CharTokenizer(BaseTokenizer):
    """One id per character, from 1 on; id 0 is the end-of-text token, which has no text."""

    def __init__(self, characters: str) -> None:
        super().__init__()
        if len(set(characters)) < len(characters):
            raise ValueError(f"characters must differ from each other, got {characters!r}")
        self.characters = characters
        self.eos_id = 0

    def encode(self, text: str, *, add_eos: bool = False, **_: Any) -> list[int]:
        """Return the token ids of a string; raises ValueError for unknown characters."""
        if unknown := sorted(set(text) - set(self.characters)):
            raise ValueError(
                f"this tokenizer knows the characters {self.characters!r}, got {unknown} in {text!r}"
            )
        ids = [self.characters.index(character) + 1 for character in text]
        return ids + [self.eos_id] * add_eos

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Return the text of ids. A larger model may sample ids beyond the vocabulary; they become U+FFFD."""
        characters = self.characters
        return "".join(
            characters[i - 1] if i <= len(characters) else "\ufffd" for i in token_ids if i > 0
        )

    def get_vocab_size(self) -> int:
        return len(self.characters) + 1


class CharTask(Task):
    """Random problems that are spelled in a few characters; the reward is 1 for the right answer, else 0."""

    def __init__(self, characters: str, seed: int) -> None:
        super().__init__(CharTokenizer(characters))
        self.seed = seed

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Return (text, answer) of a random problem."""

    def prompt(self, index: int, kind: str = "training") -> Prompt:
        return self.make_prompt(*self.draw(random.Random(f"{self.seed} {kind} {index}")))

    def held_out(self, n: int) -> list[Prompt]:
        return [self.prompt(index, "held out") for index in range(n)]

    def grade(self, prompt: Prompt, text: str) -> Grade:
        exact = float(text == prompt.answer)
        return Grade(exact, {"exact": exact})


class SumDigitsTask(CharTask):
    """Add numbers from 0 to `value_max`: "3+4=" expects "7". Sums have num_min to num_max numbers."""

    def __init__(self, num_min: int = 2, num_max: int = 2, value_max: int = 9, seed: int = 0):
        super().__init__("0123456789+=", seed)
        self.num_min, self.num_max, self.value_max = num_min, num_max, value_max

    def draw(self, rng: random.Random) -> tuple[str, str]:
        n = rng.randint(self.num_min, self.num_max)
        numbers = [rng.randint(0, self.value_max) for _ in range(n)]
        return "+".join(map(str, numbers)) + "=", str(sum(numbers))


class CopyTask(CharTask):
    """Repeat letters: "cab=" expects "cab". The reward is the share of correct positions."""

    def __init__(self, length: int = 3, num_letters: int = 8, seed: int = 0):
        self.length, self.letters = length, string.ascii_lowercase[:num_letters]
        super().__init__(self.letters + "=", seed)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        letters = "".join(rng.choices(self.letters, k=self.length))
        return letters + "=", letters

    def grade(self, prompt: Prompt, text: str) -> Grade:
        hits = sum(a == b for a, b in zip(text, prompt.answer, strict=False))
        share = hits / max(len(text), len(prompt.answer))
        return Grade(share, {"exact": float(text == prompt.answer)})


class SortTask(CopyTask):
    """Put letters in order: "cab=" expects "abc". The reward is as in `CopyTask`."""

    def draw(self, rng: random.Random) -> tuple[str, str]:
        text, letters = super().draw(rng)
        return text, "".join(sorted(letters))


class GuessTask(CharTask):
    """Find a number in several turns; a reply is "<" if the number is below the guess, else ">"."""

    def __init__(self, value_max: int = 9, seed: int = 0):
        super().__init__("0123456789<>?", seed)
        self.value_max = value_max

    def draw(self, rng: random.Random) -> tuple[str, str]:
        return "?", str(rng.randint(0, self.value_max))

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        guess, number = turns[-1].text, prompt.answer
        if guess == number or not guess.isdecimal():
            return None
        return "<" if int(number) < int(guess) else ">"


def build(rl: Any, *_: Any) -> Task:
    """Return the task that `rl.task.name` names. This function is a `TaskBuilder`."""
    task = rl.task
    match task.name:
        case "sum_digits":
            return SumDigitsTask(task.num_min, task.num_max, task.value_max, rl.seed)
        case "guess":
            return GuessTask(task.value_max, rl.seed)
    return {"copy": CopyTask, "sort": SortTask}[task.name](task.length, task.num_letters, rl.seed)
