"""A task with prompts from a file, graded by the user's function: `rl.task.name = "jsonl"`."""

import inspect
import json
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.rl.function_pool import Call, FunctionPool, Result
from torchtitan.rl.tasks import Grade, Prompt, Task, Turn, explained, find_function
from torchtitan.rl.tools import Toolbox, tool_calls
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger


class JsonlTask(Task):
    """Prompts from a file with one JSON object per line, graded by the user's function.

    Each epoch has a new random order. Arguments are those of `[rl.task]`, and:

    reward_fn: (completion text, expected answer) -> reward, or a dict of scores with the reward under
        "total" (see `rewards.scores_of`). If it has parameters of these names, it also gets `prompt`
        (the prompt's text), `row` (the line's JSON object) and `turns` (a list of
        each turn's text and reply; the last reply is None). The score `exact` is 1 for the exact answer.
    reward_pool: processes that call the reward function instead of this process. A call that hangs or
        dies gives reward 0, score `verifier_failed` 1, and a warning.
    chat: renders prompts that are lists of messages; None refuses such lines.
    tools: functions that the policy may call. Then all prompts must be lists of messages, replies are
        the calls' results, a turn without a call ends the episode, and `tool_calls` is a score.
    max_prompt_tokens: longer prompts are left out, with a warning; None keeps all.
    Raises ValueError for invalid lines, for a chat template that would change earlier turns, and if no
    prompt is left.
    """

    def __init__(
        self,
        path: str,
        reward_fn: Callable[..., float | dict[str, float]],
        tokenizer: BaseTokenizer,
        *,
        reward_pool: FunctionPool | None = None,
        chat: ChatTemplate | None = None,
        tools: Toolbox | None = None,
        eval_path: str = "",
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        max_prompt_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer)
        self.reward_fn, self.seed, self.reward_pool = reward_fn, seed, reward_pool
        self._reward_parameters: set[str] = set()
        # ValueError: some functions written in C have no signature.
        with suppress(ValueError):
            self._reward_parameters = set(list(inspect.signature(reward_fn).parameters)[2:])
        self._prompt_key, self._answer_key = prompt_key, answer_key
        self.chat, self.tools, self._schemas = chat, tools, tools and tools.schemas
        self._longest = math.inf if max_prompt_tokens is None else max_prompt_tokens
        self._prompts = self._read(path)
        self._held_out = self._read(eval_path) if eval_path else self._prompts
        # The current epoch, and its order of prompts.
        self._order: tuple[int, list[int]] = (-1, [])
        if chat is not None and tools is not None:
            messages = self.messages(self._prompts[0])
            result = {"role": "tool", "name": "", "content": "what the tool returned"}
            chat.check_turns(messages, result, tools=self._schemas)
            if chat.render(messages) == chat.render(messages, tools=self._schemas):
                logger.warning(
                    "%s does not read `tools`, so prompts do not describe rl.task.tools; set "
                    "rl.task.chat_template to a file with a template that reads `tools`",
                    chat.name,
                )

    # ---- prompts ----

    def _read(self, path: str) -> list[Prompt]:
        prompts = []
        with open_file(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        prompts.append(self._prompt_of(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= self._longest]
        if (n_long := len(prompts) - len(kept)) > 0:
            logger.warning(
                f"{n_long} of {len(prompts)} prompts in {path} have more than {self._longest} tokens and "
                "are left out; raise rl.batch.seq_len, or lower rl.sampling.max_tokens"
            )
        if not kept:
            raise ValueError(
                f"rl.task.path must hold prompts that fit into rl.batch.seq_len, got none of "
                f"{len(prompts)} in {path!r}; correct the path"
            )
        return kept

    def _prompt_of(self, line: bytes) -> Prompt:
        """Return the prompt of a line; raises ValueError for a bad line."""
        try:
            values = json.loads(line)
            # Encoding raises if the line has an unpaired surrogate.
            json.dumps(values, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        text = values.get(self._prompt_key) if isinstance(values, dict) else None
        is_chat = isinstance(text, list)
        if not text or not (is_chat or (isinstance(text, str) and self.tools is None)):
            kind = "a string or a list of messages"
            if self.tools is not None:
                kind = "a list of messages, because of rl.task.tools,"
            raise ValueError(
                f"rl.task.prompt_key = {self._prompt_key!r} must name {kind} in every line, got "
                f"{text!r}; correct the line or the key"
            )
        answer = values.get(self._answer_key, "")
        if isinstance(answer, dict | list | None):
            raise ValueError(
                f"rl.task.answer_key = {self._answer_key!r} must name a string or a number, got "
                f"{json.dumps(answer)}; correct the line or the key"
            )
        answer = answer if isinstance(answer, str) else json.dumps(answer)
        if not is_chat:
            return replace(self.make_prompt(text, answer), row=values)
        if self.chat is None:
            raise ValueError(
                "the prompt is a list of messages, and the tokenizer in model.hf_assets_path has no "
                "chat template; set rl.task.chat_template to a file with a template"
            )
        for message in text:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"a message must be an object with a role, got {message!r}")
        rendered = self.chat.render(text, tools=self._schemas)
        token_ids = self.tokenizer.encode(rendered, add_special_tokens=False)
        return Prompt(rendered, tuple(token_ids), answer, values)

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self.seed} pass {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._prompts[self._order[1][place]]

    def held_out(self, n: int) -> list[Prompt]:
        return self._held_out[:n]

    # ---- replies ----

    def messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the messages of a prompt that is a list of messages."""
        assert prompt.row is not None
        return prompt.row[self._prompt_key]

    def chat_reply(
        self, prompt: Prompt, turns: Sequence[Turn], messages: Sequence[dict[str, Any]]
    ) -> str:
        """Render messages that answer the last turn; returns a string for `reply` to return."""
        assert self.chat is not None
        return self.chat.continuation(
            self.messages(prompt), messages, stop=turns[-1].stop, tools=self._schemas
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
        for (prompt, turns), own in zip(episodes, calls, strict=True):
            messages = [{"role": "tool", "name": x.name, "content": next(results)} for x in own]
            replies.append(self.chat_reply(prompt, turns, messages) if messages else None)
        return replies

    # ---- grades ----

    def grade(self, prompt: Prompt, text: str) -> Grade:
        return self.grade_all([(prompt, text)])[0]

    def grade_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Grade]:
        return self.grade_episodes([(prompt, [Turn(text)]) for prompt, text in pairs])

    def grade_episodes(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Grade]:
        calls: list[Call] = []
        for prompt, turns in episodes:
            texts = [(turn.text, turn.reply) for turn in turns]
            known = {"prompt": prompt.text, "row": prompt.row, "turns": texts}
            by_name = {name: known[name] for name in self._reward_parameters & known.keys()}
            calls.append(((turns[-1].text, prompt.answer), by_name))
        if self.reward_pool is not None:
            results = self.reward_pool.call_all(calls)
        else:
            results = []
            for (prompt, turns), (arguments, by_name) in zip(episodes, calls, strict=True):
                with explained("grading", "reward function", prompt, turns[-1].text):
                    results.append(Result(self.reward_fn(*arguments, **by_name)))
        pairs = zip(results, episodes, strict=True)
        return [self._grade_of(result, *episode) for result, episode in pairs]

    def _grade_of(self, result: Result, prompt: Prompt, turns: Sequence[Turn]) -> Grade:
        text, error, own = turns[-1].text, result.error, Grade(0.0)
        about = f"the completion was {text!r}, the expected answer {prompt.answer!r}"
        if error is None and result.failure is None:
            try:
                own = Grade.from_value(result.value)
            except ValueError as wrong:
                error = str(wrong)
        if error is not None:
            raise ValueError(f"grading failed: {error}; {about}; correct the reward function")
        scores = {"exact": float(text == prompt.answer)}
        if self.reward_pool is not None:
            scores["verifier_failed"] = float(result.failure is not None)
        if self.tools is not None:
            scores["tool_calls"] = sum(len(tool_calls(t.text)) for t in turns if t.reply)
        if result.failure is not None:
            logger.warning("%s: reward 0; %s", result.failure, about)
            return Grade(0.0, scores | {"exact": 0.0})
        return Grade(own.reward, scores | own.scores)

    def close(self) -> None:
        for pool in (self.reward_pool, self.tools):
            if pool is not None:
                pool.close()


def build(rl: Any, tokenizer: BaseTokenizer | None, max_prompt_tokens: int | None) -> Task:
    """Build the task that `[rl.task]` describes; a `tasks.TaskBuilder`."""
    if tokenizer is None:
        raise ValueError(
            "rl.task.name = 'jsonl' needs the model's tokenizer, got none; set model.hf_assets_path "
            "to a folder with a tokenizer, and choose a model that uses this tokenizer"
        )
    task, chat, reward_pool, tools = rl.task, None, None, None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        chat = ChatTemplate.of_tokenizer(
            tokenizer, chat_variables(task), path=task.chat_template, tools=bool(task.tools)
        )
    reward_fn = find_function(task.reward_fn)
    if task.reward_processes:
        limits = task.reward_processes, task.reward_timeout_seconds
        reward_pool = FunctionPool(task.reward_fn, *limits)
    if task.tools:
        functions = {name: find_function(name, "rl.task.tools") for name in task.tools}
        tools = Toolbox(functions, task.tool_processes, task.tool_timeout_seconds)
    return JsonlTask(
        task.path,
        reward_fn,
        tokenizer,
        reward_pool=reward_pool,
        chat=chat,
        tools=tools,
        eval_path=task.eval_path,
        prompt_key=task.prompt_key,
        answer_key=task.answer_key,
        max_prompt_tokens=max_prompt_tokens,
        seed=rl.seed,
    )


def chat_variables(task: Any) -> dict[str, Any]:
    """Return `rl.task.chat_variables` as a dict; raises ValueError if it is not a JSON object."""
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
