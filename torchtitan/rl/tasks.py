"""Tasks: prompts, replies to the policy's turns, and rewards.

Prompt i depends only on the task's seed and on i, so a task's only state is the number of drawn
prompts. `jsonl_task` reads prompts from a file; `torchtitan.experiments.rl_toy.tasks` has toy tasks.
"""

import importlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.rl.rewards import TOTAL, plain, scores_of


@dataclass(frozen=True)
class Prompt:
    """A prompt, the expected answer, and the prompt's JSON object if it comes from a file."""

    text: str
    token_ids: tuple[int, ...]
    answer: str
    row: dict[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # An array or tensor of ids has no truth value, and cannot be saved in a checkpoint's JSON.
        object.__setattr__(self, "token_ids", tuple(map(int, self.token_ids)))


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, and the environment's reply.

    text: the sampled text, without the stop token or string that ended the turn.
    stop: the text of that stop token or string, for tasks that reply.
    reply: None for the last turn.
    """

    text: str
    stop: str = ""
    reply: str | None = None


@dataclass(frozen=True)
class Grade:
    """A completion's reward and other scores by name; NumPy and torch scalars become Python numbers."""

    reward: float
    scores: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", plain(self.reward))
        scores = {name: plain(value) for name, value in self.scores.items()}
        object.__setattr__(self, "scores", scores)

    @classmethod
    def from_value(cls, value: Any) -> "Grade":
        """Return the grade that a number or a dict of scores describes; see `rewards.scores_of`.

        The dict's "total" is the reward; another key k becomes the score "reward/k".
        """
        if isinstance(value, Grade):
            return value
        scores = scores_of(value)
        return cls(scores.pop(TOTAL), {f"reward/{name}": x for name, x in scores.items()})


@contextmanager
def explained(
    what: str,
    culprit: str,
    prompt: Prompt,
    text: str,
    *,
    except_for: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turn an exception or exit in a block of user code into a ValueError with line and completion."""
    try:
        yield
    except except_for:
        raise
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{what} failed at {where.filename}, line {where.lineno}: {type(error).__name__}: "
            f"{error}; the completion was {text!r}, the expected answer {prompt.answer!r}; correct "
            f"the {culprit}"
        ) from error


class Task(ABC):
    """A source of prompts that grades their completions, and may reply to them."""

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        self._num_drawn = 0

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Return training prompt `index`, for any index from 0 on."""

    @abstractmethod
    def held_out(self, n: int) -> list[Prompt]:
        """Return n prompts to evaluate on, the same in each call; fewer if the task has fewer."""

    @abstractmethod
    def grade(self, prompt: Prompt, text: str) -> Grade | float | dict[str, float]:
        """Grade a completion's text, which does not include the end-of-text token.

        A number or a dict is read as a reward function's result; see `Grade.from_value`.
        """

    def grade_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Grade]:
        """Return the grade of each pair. Raises ValueError if grading fails."""
        grades = []
        for prompt, text in pairs:
            with explained("grading", "reward function", prompt, text, except_for=(ValueError,)):
                grades.append(Grade.from_value(self.grade(prompt, text)))
        return grades

    def grade_episodes(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Grade]:
        """Grade episodes, which may have several turns. By default, `grade_all` grades the last turn."""
        return self.grade_all([(prompt, turns[-1].text) for prompt, turns in episodes])

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return the environment's reply to the last turn; None ends the episode.

        The reply must depend only on the arguments, so that a run can be repeated. Called if the last
        turn ended with a stop and `rl.task.max_turns` allows another turn.
        """
        return None

    def reply_all(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[str | None]:
        """Return the reply to each episode. Raises ValueError if a reply fails."""
        replies = []
        for prompt, turns in episodes:
            with explained("a reply", "task", prompt, turns[-1].text, except_for=(ValueError,)):
                replies.append(self.reply(prompt, turns))
        return replies

    @property
    def replies(self) -> bool:
        """True if the task overrides `reply` or `reply_all`, so episodes may have several turns."""
        own = type(self)
        return own.reply is not Task.reply or own.reply_all is not Task.reply_all

    def close(self) -> None:  # noqa: B027, as most tasks hold nothing
        """Free the task's resources. Safe to call twice."""

    def sample(self, n: int) -> list[Prompt]:
        """Return the next n training prompts."""
        first, self._num_drawn = self._num_drawn, self._num_drawn + n
        return [self.prompt(index) for index in range(first, self._num_drawn)]

    def make_prompt(self, text: str, answer: str) -> Prompt:
        return Prompt(text, tuple(self.tokenizer.encode(text, add_eos=False)), answer)

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_drawn = state_dict["num_drawn"]


# ---- the registry of tasks ----

TaskBuilder = Callable[[Any, BaseTokenizer | None, int | None], Task]
"""(the section `[rl]`, the model's tokenizer, longest prompt in tokens) -> task"""

# name -> builder, or the builder's name (module:function), which is imported on first use
_TASKS: dict[str, TaskBuilder | str] = dict.fromkeys(
    ("sum_digits", "copy", "sort", "guess"), "torchtitan.experiments.rl_toy.tasks:build"
) | {"jsonl": "torchtitan.rl.jsonl_task:build"}


def register_task(name: str, build: TaskBuilder | None = None) -> Any:
    """Register a `TaskBuilder` for `rl.task.name`, or return a decorator; ValueError if the name is taken."""
    if build is None:
        return partial(register_task, name)
    if _TASKS.setdefault(name, build) is not build:
        raise ValueError(f"the task {name!r} is registered already; choose another name")
    return build


def task_builder(name: str) -> TaskBuilder:
    """Return the builder registered for a name; raises ValueError if there is none."""
    if name not in _TASKS:
        raise ValueError(
            f"rl.task.name must be one of {', '.join(_TASKS)}, got {name!r}; correct it, or "
            "register it in the module that experimental.custom_import names"
        )
    build = _TASKS[name]
    return find_function(build, "rl.task.name") if isinstance(build, str) else build


def build_task(
    rl: Any, tokenizer: BaseTokenizer | None = None, max_prompt_tokens: int | None = None
) -> Task:
    """Build the task of the section `[rl.task]`; `tokenizer` is the model's. Raises like `task_builder`."""
    return task_builder(rl.task.name)(rl, tokenizer, max_prompt_tokens)


def find_function(name: str, key: str = "rl.task.reward_fn") -> Callable[..., Any]:
    """Import a function by its name, module:function; raises ValueError, with `key`, on failure."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        if not callable(function):
            raise TypeError(f"{function_name} has the type {type(function).__name__}")
    except (Exception, SystemExit) as error:
        # Importing a module may raise any exception, or exit.
        raise ValueError(
            f"{key} names a function to import, got {name!r}: {type(error).__name__}: {error}; write it "
            "like my_rewards:exact_match, and put its folder on PYTHONPATH"
        ) from error
    return function
