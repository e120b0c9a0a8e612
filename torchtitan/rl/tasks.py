"""What the policy has to learn: prompts, replies to what it writes, and rewards.

Prompt number i depends only on the task's seed and on i, so one number is the state of a run.
"""

import importlib
import inspect
import json
import math
import random
import string
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.rl.advantages import LARGEST_REWARD
from torchtitan.rl.tools import Toolbox, tool_calls
from torchtitan.rl.verifiers import Call, VerifierPool
from torchtitan.tools.logging import logger


@dataclass(frozen=True)
class Prompt:
    """One problem: the policy's prompt, and the expected answer.

    row: the JSON object that it was read from, if any.
    """

    text: str
    token_ids: tuple[int, ...]
    answer: str
    row: dict[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # An array or tensor of ids has no truth value, and no place in a checkpoint's JSON.
        object.__setattr__(self, "token_ids", tuple(map(int, self.token_ids)))


@dataclass(frozen=True)
class Turn:
    """What the policy wrote at once, and what its environment replied.

    text: of the sampled tokens, without what ended them. stop: the text that did; a special token
        has one, too, where the tokenizer spells it.
    reply: None for the last turn.
    """

    text: str
    stop: str = ""
    reply: str | None = None


@dataclass(frozen=True)
class Grade:
    """A completion's reward, and other measurements by name; numbers of numpy or torch may be given."""

    reward: float
    scores: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _plain(self.reward))
        scores = {name: _plain(value) for name, value in self.scores.items()}
        object.__setattr__(self, "scores", scores)


def _plain(value: Any) -> Any:
    """A number as JSON knows it, which checkpoints and episodes.jsonl hold."""
    return value.item() if hasattr(value, "item") else value


def failed(what: str, culprit: str, error: BaseException, prompt: Prompt, text: str) -> ValueError:
    """What to raise when code of the user fails or exits, such as what grades completions."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return ValueError(
        f"{what} failed at {where.filename}, line {where.lineno}: {type(error).__name__}: {error}; "
        f"the completion was {text!r}, the expected answer {prompt.answer!r}; correct the {culprit}"
    )


@contextmanager
def _explained(what: str, culprit: str, prompt: Prompt, text: str) -> Iterator[None]:
    """Raise `failed` in place of what a task raises; a ValueError says enough."""
    try:
        yield
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(what, culprit, error, prompt, text) from error


class CharTokenizer(BaseTokenizer):
    """One id per character, from 1 on; id 0 is the end-of-text token, which has no text."""

    def __init__(self, characters: str) -> None:
        super().__init__()
        if len(set(characters)) < len(characters):
            raise ValueError(f"characters must differ from each other, got {characters!r}")
        self.characters = characters
        self.eos_id = 0
        self._ids = {character: i for i, character in enumerate(characters, start=1)}

    def encode(self, text: str, *, add_eos: bool = False, **_: Any) -> list[int]:
        """Raises ValueError for unknown characters."""
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise ValueError(
                f"this tokenizer knows the characters {self.characters!r}, got {unknown} in {text!r}"
            )
        return [self._ids[character] for character in text] + [self.eos_id] * add_eos

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Ids beyond the vocabulary, which a larger model may draw, become U+FFFD."""
        known = len(self.characters)
        return "".join(
            self.characters[i - 1] if i <= known else "\ufffd" for i in token_ids if i > 0
        )

    def get_vocab_size(self) -> int:
        return len(self.characters) + 1


class Task(ABC):
    """A source of prompts that grades their completions, and may reply to them.

    tokenizer: of prompts and completions; its eos_id ends a completion.
    """

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        self._num_drawn = 0

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Training prompt number `index`, from 0 without end."""

    @abstractmethod
    def held_out(self, n: int) -> list[Prompt]:
        """The prompts to evaluate on, the same each time; fewer if there are no more."""

    @abstractmethod
    def grade(self, prompt: Prompt, text: str) -> Grade:
        """Grade a completion's text, which holds no end-of-text token."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Grade]:
        """As `grade` for each pair. Raises ValueError where grading fails."""
        grades = []
        for prompt, text in pairs:
            with _explained("grading", "reward function", prompt, text):
                grades.append(self.grade(prompt, text))
        return grades

    def grade_episodes(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Grade]:
        """Grade episodes by all that was said in them; here by the text of their last turns.

        A sum of rewards per turn is a reward. Raises as `grade_all`.
        """
        return self.grade_all([(prompt, turns[-1].text) for prompt, turns in episodes])

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """What the environment says to the last turn; None ends the episode.

        It has to follow from the arguments, for a run to be repeatable. Called where a turn ended by
        itself and `rl.task.max_turns` allows another one.
        """
        return None

    def reply_all(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[str | None]:
        """As `reply` for each episode. Raises ValueError where it fails."""
        replies = []
        for prompt, turns in episodes:
            with _explained("a reply", "task", prompt, turns[-1].text):
                replies.append(self.reply(prompt, turns))
        return replies

    @property
    def replies(self) -> bool:
        """Whether episodes may have several turns."""
        own = type(self)
        return own.reply is not Task.reply or own.reply_all is not Task.reply_all

    def close(self) -> None:  # noqa: B027, as most tasks hold nothing
        """Free what the task holds. Safe to call twice."""

    def sample(self, n: int) -> list[Prompt]:
        """The next n training prompts."""
        first, self._num_drawn = self._num_drawn, self._num_drawn + n
        return [self.prompt(index) for index in range(first, self._num_drawn)]

    def make_prompt(self, text: str, answer: str) -> Prompt:
        return Prompt(text, tuple(self.tokenizer.encode(text, add_eos=False)), answer)

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self._num_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_drawn = state_dict["num_drawn"]


# ---- tasks spelled in characters ----


class CharTask(Task):
    """A task whose problems are drawn at random and spelled in a few characters. The reward is 1 for
    the answer and 0 for anything else.

    Held-out prompts are drawn apart from those of training, but may repeat them where there are
    few problems.
    """

    def __init__(self, characters: str, seed: int) -> None:
        super().__init__(CharTokenizer(characters))
        self.seed = seed

    @abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """A random problem: its text and its answer."""

    def prompt(self, index: int) -> Prompt:
        return self.make_prompt(*self.draw(random.Random(f"{self.seed} training {index}")))

    def held_out(self, n: int) -> list[Prompt]:
        rngs = (random.Random(f"{self.seed} held out {index}") for index in range(n))
        return [self.make_prompt(*self.draw(rng)) for rng in rngs]

    def grade(self, prompt: Prompt, text: str) -> Grade:
        exact = float(text == prompt.answer)
        return Grade(exact, {"exact": exact})


class SumDigitsTask(CharTask):
    """Add numbers: "3+4=" expects "7". The reward is 1 for the sum and 0 for anything else.

    num_min, num_max: how many numbers. value_max: the largest; the smallest is 0.
    """

    def __init__(self, num_min: int = 2, num_max: int = 2, value_max: int = 9, seed: int = 0):
        super().__init__("0123456789+=", seed)
        self.num_min, self.num_max, self.value_max = num_min, num_max, value_max

    def draw(self, rng: random.Random) -> tuple[str, str]:
        n = rng.randint(self.num_min, self.num_max)
        numbers = [rng.randint(0, self.value_max) for _ in range(n)]
        return "+".join(map(str, numbers)) + "=", str(sum(numbers))


class CopyTask(CharTask):
    """Repeat letters: "cab=" expects "cab". The reward is the share of correct positions.

    length: letters in a prompt. num_letters: how many different ones there are, from a on.
    """

    def __init__(self, length: int = 3, num_letters: int = 8, seed: int = 0):
        self.length, self.letters = length, string.ascii_lowercase[:num_letters]
        super().__init__(self.letters + "=", seed)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        letters = "".join(rng.choices(self.letters, k=self.length))
        return letters + "=", self.answer(letters)

    def answer(self, letters: str) -> str:
        return letters

    def grade(self, prompt: Prompt, text: str) -> Grade:
        hits = sum(a == b for a, b in zip(text, prompt.answer, strict=False))
        share = hits / max(len(text), len(prompt.answer))
        return Grade(share, {"exact": float(text == prompt.answer)})


class SortTask(CopyTask):
    """Put letters in order: "cab=" expects "abc". The reward is as in `CopyTask`."""

    def answer(self, letters: str) -> str:
        return "".join(sorted(letters))


class GuessTask(CharTask):
    """Find a number in several turns: a wrong guess is answered by "<" or ">", as the number is less
    or greater. The reward is 1 if the last guess is right. All prompts are "?".

    value_max: the largest number; the smallest is 0.
    """

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


# ---- prompts from a file ----


class JsonlTask(Task):
    """Prompts from a file with one JSON object per line, graded by the user's function.

    Each pass over the file has another order.

    path, eval_path: files for training and evaluation; without eval_path evaluation takes the first
        lines of `path`.
    reward_fn: (completion text, expected answer) -> reward. Where it has parameters of these names,
        it gets `prompt`, the prompt's text, `row`, its JSON object, and `turns`, a list of (text,
        reply) of all turns, the last one's reply being None. Exact answers are counted, too.
    verifiers: processes that call the function of this name, in place of `reward_fn`. One that hangs
        or dies gives a reward of 0, a score `verifier_failed` and a warning.
    chat: renders prompts that are lists of messages; None refuses such lines.
    tools: what the policy may call. Then all prompts are lists of messages, results of calls are
        replies, and a turn without a call ends the episode; `tool_calls` counts them.
    max_prompt_tokens: longer prompts are left out, and counted in a warning; None keeps all.
    Raises ValueError for other lines, for a chat template that would change earlier turns, and if no
    prompt is left.
    """

    def __init__(
        self,
        path: str,
        reward_fn: Callable[..., float],
        tokenizer: BaseTokenizer,
        *,
        verifiers: VerifierPool | None = None,
        chat: ChatTemplate | None = None,
        tools: Toolbox | None = None,
        eval_path: str = "",
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        max_prompt_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer)
        self.reward_fn, self.seed, self.verifiers = reward_fn, seed, verifiers
        self._reward_names: set[str] = set()
        with suppress(ValueError):  # some functions written in C
            self._reward_names = set(list(inspect.signature(reward_fn).parameters)[2:])
        self._prompt_key, self._answer_key = prompt_key, answer_key
        self.chat, self.tools = chat, tools
        self._longest = math.inf if max_prompt_tokens is None else max_prompt_tokens
        self._prompts = self._read(path)
        self._held_out = self._read(eval_path) if eval_path else self._prompts
        self._order: tuple[int, list[int]] = (-1, [])  # of a pass over the file
        if tools is not None:
            assert chat is not None
            result = {"role": "tool", "name": "", "content": "what the tool returned"}
            chat.check_turns(self.messages(self._prompts[0]), result, tools=tools.schemas)

    def _read(self, path: str) -> list[Prompt]:
        prompts = []
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    values = json.loads(line)
                    json.dumps(values, ensure_ascii=False).encode()  # no half of a surrogate pair
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from error
                text = values.get(self._prompt_key) if isinstance(values, dict) else None
                is_chat = isinstance(text, list)
                if not text or not (is_chat or isinstance(text, str)):
                    raise ValueError(
                        f"{path}, line {number}: rl.task.prompt_key = {self._prompt_key!r} must "
                        f"name a text or a list of messages in every line, got {text!r}; correct the "
                        "line or the key"
                    )
                if self.tools is not None and not is_chat:
                    raise ValueError(
                        f"{path}, line {number}: with rl.task.tools prompts are lists of messages, "
                        f'got {text!r}; write [{{"role": "user", "content": ...}}]'
                    )
                answer = values.get(self._answer_key, "")
                if isinstance(answer, dict | list | None):
                    raise ValueError(
                        f"{path}, line {number}: rl.task.answer_key = {self._answer_key!r} must "
                        f"name a text or a number, got {json.dumps(answer)}; correct the line or "
                        "the key"
                    )
                answer = answer if isinstance(answer, str) else json.dumps(answer)
                if is_chat:
                    try:
                        prompt = self._chat_prompt(text, answer)
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}") from error
                else:
                    prompt = self.make_prompt(text, answer)
                prompts.append(replace(prompt, row=values))
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= self._longest]
        if len(kept) < len(prompts):
            logger.warning(
                "%d of %d prompts in %s have more than %d tokens and are left out; raise "
                "rl.batch.seq_len, or lower rl.sampling.max_tokens",
                len(prompts) - len(kept),
                len(prompts),
                path,
                self._longest,
            )
        if not kept:
            raise ValueError(
                f"rl.task.path must hold prompts that fit into rl.batch.seq_len, got none of "
                f"{len(prompts)} in {path!r}"
            )
        return kept

    def _chat_prompt(self, messages: list[Any], answer: str) -> Prompt:
        if self.chat is None:
            raise ValueError(
                "the prompt is a list of messages, and the tokenizer in model.hf_assets_path has no "
                "chat template; set rl.task.chat_template to a file with one"
            )
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"a message must be an object with a role and a content, got {message!r}"
                )
        text = self.chat.render(messages, tools=self.tools and self.tools.schemas)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(text, tuple(token_ids), answer)

    def messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Those of a prompt that is a chat."""
        assert prompt.row is not None
        return prompt.row[self._prompt_key]

    def chat_reply(
        self, prompt: Prompt, turns: Sequence[Turn], messages: Sequence[dict[str, Any]]
    ) -> str:
        """The text of messages that answer the last turn, for a `reply` in a chat."""
        assert self.chat is not None
        schemas = self.tools and self.tools.schemas
        return self.chat.continuation(
            self.messages(prompt), messages, stop=turns[-1].stop, tools=schemas
        )

    @property
    def replies(self) -> bool:
        own = type(self)
        replies = own.reply is not Task.reply or own.reply_all is not JsonlTask.reply_all
        return replies or self.tools is not None

    def reply_all(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[str | None]:
        if self.tools is None:
            return super().reply_all(episodes)
        calls = [tool_calls(turns[-1].text) for _, turns in episodes]
        results = iter(self.tools.results([call for of_turn in calls for call in of_turn]))
        replies: list[str | None] = []
        for (prompt, turns), of_turn in zip(episodes, calls, strict=True):
            messages = [
                {"role": "tool", "name": call.name, "content": next(results)} for call in of_turn
            ]
            replies.append(self.chat_reply(prompt, turns, messages) if messages else None)
        return replies

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self.seed} pass {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._prompts[self._order[1][place]]

    def held_out(self, n: int) -> list[Prompt]:
        return self._held_out[:n]

    def grade(self, prompt: Prompt, text: str) -> Grade:
        return self._grade_turns(prompt, [Turn(text)])

    def grade_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Grade]:
        return self.grade_episodes([(prompt, [Turn(text)]) for prompt, text in pairs])

    def grade_episodes(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Grade]:
        grades = self._grades(episodes)
        if self.tools is None:
            return grades
        counts = [sum(len(tool_calls(t.text)) for t in turns if t.reply) for _, turns in episodes]
        return [
            replace(grade, scores=grade.scores | {"tool_calls": count})
            for grade, count in zip(grades, counts, strict=True)
        ]

    def _grades(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Grade]:
        if self.verifiers is None:
            return [self._grade_turns(prompt, turns) for prompt, turns in episodes]
        verdicts = self.verifiers.call_all([self._call(*episode) for episode in episodes])
        grades = []
        for (prompt, turns), verdict in zip(episodes, verdicts, strict=True):
            text = turns[-1].text
            about = f"the completion was {text!r}, the expected answer {prompt.answer!r}"
            if verdict.error is not None:
                raise ValueError(
                    f"grading failed: {verdict.error}; {about}; correct the reward function"
                )
            if verdict.failure is not None:
                logger.warning("%s: reward 0; %s", verdict.failure, about)
                grades.append(Grade(0.0, {"exact": 0.0, "verifier_failed": 1.0}))
                continue
            grade = self._as_grade(verdict.value, prompt, text)
            grades.append(Grade(grade.reward, grade.scores | {"verifier_failed": 0.0}))
        return grades

    def _grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> Grade:
        arguments, by_name = self._call(prompt, turns)
        try:
            returned = self.reward_fn(*arguments, **by_name)
        except (Exception, SystemExit) as error:
            raise failed("grading", "reward function", error, prompt, turns[-1].text) from error
        return self._as_grade(returned, prompt, turns[-1].text)

    def _call(self, prompt: Prompt, turns: Sequence[Turn]) -> Call:
        """The arguments of the reward function."""
        said = [(turn.text, turn.reply) for turn in turns]
        known = {"prompt": prompt.text, "row": prompt.row, "turns": said}
        by_name = {name: known[name] for name in self._reward_names & known.keys()}
        return (turns[-1].text, prompt.answer), by_name

    def close(self) -> None:
        for pool in (self.verifiers, self.tools):
            if pool is not None:
                pool.close()

    @staticmethod
    def _as_grade(returned: Any, prompt: Prompt, text: str) -> Grade:
        try:
            reward = float(returned)
        except (TypeError, ValueError, OverflowError):
            reward = math.nan
        if not abs(reward) <= LARGEST_REWARD:
            raise ValueError(
                f"the function rl.task.reward_fn must return a finite number, at most "
                f"{LARGEST_REWARD:g} in size, got {returned!r} for the completion {text!r} and the "
                f"answer {prompt.answer!r}; correct it"
            )
        return Grade(reward, {"exact": float(text == prompt.answer)})


def find_function(name: str, key: str = "rl.task.reward_fn") -> Callable[..., Any]:
    """Import the function that `name`, module:function, stands for; ValueError if there is none.

    key: of the config, for errors.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"{key} names a function as module:function, got {name!r}; "
            f"write it like my_rewards:exact_match"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # a module may raise anything, or end the process
        raise ValueError(
            f"{key} names a function to import, got {name!r}: {type(error).__name__}: "
            f"{error}; give its dotted module name and start where Python can find it"
        ) from error
    if not callable(function):
        raise ValueError(
            f"{key} must be called, got {name!r}, which is a {type(function).__name__}; name a function"
        )
    return function


def chat_variables(task: Any) -> dict[str, Any]:
    """Those of the chat template, from the section `[rl.task]`; ValueError if it has no such."""
    try:
        variables = json.loads(task.chat_variables or "{}")
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise ValueError(
            f"rl.task.chat_variables must be a JSON object, got {task.chat_variables!r}; write it "
            "like '{\"enable_thinking\": false}'"
        )
    return variables


# ---- by name ----

TaskBuilder = Callable[[Any, BaseTokenizer | None, int | None], Task]
"""(the section `[rl]`, the model's tokenizer, longest prompt in tokens) -> task"""


def _build_jsonl(rl: Any, tokenizer: BaseTokenizer | None, longest: int | None) -> Task:
    if tokenizer is None:
        raise ValueError(
            "rl.task.name = 'jsonl' needs the model's tokenizer, got none; set "
            "model.hf_assets_path to a folder that has one, with a model that builds it"
        )
    task, chat = rl.task, None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        chat = ChatTemplate.of_tokenizer(
            tokenizer,
            chat_variables(task),
            path=task.chat_template,
            tools=bool(task.tools),
        )
    return JsonlTask(
        task.path,
        find_function(task.reward_fn),
        tokenizer,
        verifiers=VerifierPool(task.reward_fn, task.reward_processes, task.reward_timeout_seconds)
        if task.reward_processes
        else None,
        chat=chat,
        tools=Toolbox(
            {name: find_function(name, "rl.task.tools") for name in task.tools},
            task.tool_processes,
            task.tool_timeout_seconds,
        )
        if task.tools
        else None,
        eval_path=task.eval_path,
        prompt_key=task.prompt_key,
        answer_key=task.answer_key,
        max_prompt_tokens=longest,
        seed=rl.seed,
    )


_TASKS: dict[str, TaskBuilder] = {
    "sum_digits": lambda rl, *_: SumDigitsTask(
        rl.task.num_min, rl.task.num_max, rl.task.value_max, rl.seed
    ),
    "copy": lambda rl, *_: CopyTask(rl.task.length, rl.task.num_letters, rl.seed),
    "sort": lambda rl, *_: SortTask(rl.task.length, rl.task.num_letters, rl.seed),
    "guess": lambda rl, *_: GuessTask(rl.task.value_max, rl.seed),
    "jsonl": _build_jsonl,
}


def register_task(name: str, build: TaskBuilder) -> None:
    """Make a task known as `rl.task.name`; raises ValueError if the name is taken."""
    if _TASKS.setdefault(name, build) is not build:
        raise ValueError(f"the task {name!r} is registered already; choose another name")


def task_builder(name: str) -> TaskBuilder:
    """The builder registered for a name; raises ValueError if there is none."""
    if name not in _TASKS:
        raise ValueError(
            f"rl.task.name must be one of {', '.join(_TASKS)}, got {name!r}; correct it, or "
            "register it in the module that experimental.custom_import names"
        )
    return _TASKS[name]


def build_task(
    rl: Any, tokenizer: BaseTokenizer | None = None, max_prompt_tokens: int | None = None
) -> Task:
    """The task that the section `[rl.task]` describes.

    tokenizer: the model's; tasks spelled in characters bring their own.
    max_prompt_tokens: leave out longer prompts of a file.
    Raises ValueError for an unknown name, and what the task's constructor raises.
    """
    return task_builder(rl.task.name)(rl, tokenizer, max_prompt_tokens)
