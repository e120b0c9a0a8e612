"""Collects rollouts: completes prompts, grades the completions, and gives every rank all episodes.

Each rank draws and grades a share of the completions. The draws depend on `rl.seed`, the step, the
prompt's place (its index in the step) and the turn, not on the rank or on timing, so a resumed run
draws the same completions, even in another layout.

If the task replies, an episode is a dialogue: sampled tokens, the reply's tokens, sampled tokens,
and so on. Sampled tokens are never decoded and encoded again.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.data.chat_template import SEAM
from torchtitan.distributed.processes.ranks import all_ranks, num_ranks, on_all_ranks
from torchtitan.rl.advantages import AdvantageEstimator, OverlongPenalty
from torchtitan.rl.generator import Generator
from torchtitan.rl.job_config import RL
from torchtitan.rl.tasks import Grade, Prompt, Task, Turn
from torchtitan.rl.types import Completion, Episode, SamplingConfig
from torchtitan.tools.errors import LostConnectionError, RunError
from torchtitan.tools.utils import use_device

T = TypeVar("T")


class LostGeneratorError(LostConnectionError):
    """The connection to a generating rank is lost."""


class Try(NamedTuple):
    """One attempt at a step: a prompt for each place, and the sampling settings."""

    prompts: Sequence[Prompt]
    sampling: SamplingConfig


@dataclass(frozen=True)
class Request:
    """A request for `num_samples` episodes of each prompt; the prompt's place is their `group_id`.

    tries: each further try replaces the prompts whose completions all got the same reward.
    penalty: subtracted from rewards of long completions.
    stop_strings: strings that end a completion; stop strings in `Try.sampling` are ignored.
    max_turns: number of turns that the policy may take in an episode.
    max_tokens: length limit of an episode, prompt included; an episode ends if another turn may not fit.
    """

    tries: Sequence[Try]
    num_samples: int
    penalty: OverlongPenalty | None = None
    stop_strings: tuple[str, ...] = ()
    max_turns: int = 1
    max_tokens: int | None = None

    def with_extras(self, episode: Episode, number: int) -> Episode:
        """Return an episode of try `number` with the request's penalty and scores added."""
        if len(self.tries) > 1:
            episode = replace(episode, scores=episode.scores | {"redraws": number})
        if self.penalty is not None:
            penalty = self.penalty(max(episode.turn_lengths))
            scores = episode.scores | {"overlong_penalty": penalty}
            episode = replace(episode, reward=episode.reward - penalty, scores=scores)
        return episode


class DrawsEpisodes(Protocol):
    """Draws the episodes of a step: on the ranks that train (`Draws`), or on separate ranks."""

    def begin(self, request: Request) -> Callable[[], list[Episode]]:
        """Start sampling with the current weights. Returns a collective function, which waits for the
        episodes of all ranks and returns them.
        """

    def close(self) -> None: ...


class Draws:
    """Completes prompts with this rank's generator (in a thread if `ahead`), and grades the completions."""

    def __init__(self, task: Task, generator: Generator, device: torch.device, *, ahead: bool):
        self.task, self._generator, self._thread = task, generator, None
        if ahead:
            self._thread = ThreadPoolExecutor(1, "rollouts", use_device, (device,))

    def begin(self, request: Request) -> Callable[[], list[Episode]]:
        return partial(_of_all_ranks, self.begin_share(request))

    def begin_share(self, request: Request) -> Callable[[], list[Episode]]:
        """Like `begin`, for this rank's share; without a thread, the returned function draws when called."""
        draw = partial(self._draw, self._generator.pinned(), request)
        return draw if self._thread is None else self._thread.submit(draw).result

    def _draw(self, generator: Generator, request: Request) -> list[Episode]:
        """Return the episodes of this rank's share of a request, in the order of the prompts."""
        own, places = _shares(len(request.tries[0].prompts), _num_together(generator))
        by_place: dict[int, list[Episode]] = {}
        for number, (prompts, sampling) in enumerate(request.tries):
            is_last_try = number + 1 == len(request.tries)
            dialogues = going_on = [
                _Dialogue(prompts[place], place, place * request.num_samples + i)
                for place in places
                for i in range(request.num_samples)
            ]
            stops, decode, seed = request.stop_strings, self.task.tokenizer.decode, sampling.seed
            sampling = replace(sampling, stop_strings=stops, decode=decode)
            for turn in range(1, request.max_turns + 1):
                take = partial(self._turn, generator, request, sampling, turn, going_on, own)
                is_last = is_last_try and turn == request.max_turns
                replies = dict(chain.from_iterable(_agreed(generator, take, is_last=is_last)))
                if not replies:
                    break
                going_on = [dialogue for dialogue in going_on if dialogue.row in replies]
                for dialogue in going_on:
                    dialogue.reply(*replies[dialogue.row])
                if seed is not None:
                    next_seed = random.Random(f"{seed} turn {turn}").getrandbits(63)
                    sampling = replace(sampling, seed=next_seed)
            # Only the rank that drew a completion grades it: a reward function may be slow or random.
            graded = [dialogue for dialogue in dialogues if dialogue.place in own]
            grade = partial(self._grade, request, number, graded, by_place)
            again = _agreed(generator, grade, is_last=is_last_try)
            if not any(again):
                break
            places = [place for place in places if any(place in of_rank for of_rank in again)]
        return [episode for place in sorted(by_place) for episode in by_place[place]]

    def _turn(
        self,
        generator: Generator,
        request: Request,
        sampling: SamplingConfig,
        turn: int,
        dialogues: Sequence["_Dialogue"],
        own: range,
    ) -> list[tuple[int, tuple[str, list[int]]]]:
        """Draw a turn of each dialogue; return (the dialogue's row, (text, token ids)) for each reply.

        own: the places (prompt indices) whose dialogues get replies on this rank. A dialogue without a
            reply has ended.
        """
        # In the first turn, all samples of a prompt have the same context, so it is prefilled once.
        n_samples = request.num_samples if turn == 1 else 1
        first_of_each = dialogues[::n_samples]
        completions = generator.generate(
            [dialogue.context for dialogue in first_of_each],
            sampling,
            n_samples,
            first_row=[dialogue.row for dialogue in first_of_each],
        )
        for dialogue, completion in zip(dialogues, completions, strict=True):
            dialogue.complete(completion)
            # Each rank decodes only its own dialogues.
            if dialogue.place in own:
                text_and_stop = _text_and_stop(self.task, completion, sampling.stop_strings)
                dialogue.turns.append(Turn(*text_and_stop))
        if turn == request.max_turns:
            return []
        ended = [d for d in dialogues if d.completions[-1].finish_reason == "stop"]
        ended = [d for d in ended if d.place in own]
        pairs = [(d.prompt, d.turns) for d in ended]
        options = {"add_bos": False, "add_eos": False, "add_special_tokens": False}
        replies = []
        for dialogue, text in zip(ended, self.task.reply_all(pairs), strict=True):
            if text is None:
                continue
            parts = [self.task.tokenizer.encode(part, **options) for part in text.split(SEAM)]
            token_ids, text = list(chain.from_iterable(parts)), text.replace(SEAM, "")
            if not token_ids:
                raise ValueError(
                    f"the task's reply in a dialogue must have a token, got {text!r} (the prompt's expected "
                    f"answer is {dialogue.prompt.answer!r}); return None to end an episode"
                )
            longest = len(dialogue.context) + len(token_ids) + sampling.max_tokens
            if request.max_tokens is not None and longest > request.max_tokens:
                dialogue.is_out_of_room = True
            else:
                replies.append((dialogue.row, (text, token_ids)))
        return replies

    def _grade(
        self,
        request: Request,
        number: int,
        dialogues: Sequence["_Dialogue"],
        by_place: dict[int, list[Episode]],
    ) -> list[int]:
        """Add graded episodes to `by_place`; return the keys whose completions all got the same reward."""
        drawn: dict[int, list[Episode]] = {}
        for episode in _graded(self.task, dialogues, several_turns=request.max_turns > 1):
            drawn.setdefault(episode.group_id, []).append(request.with_extras(episode, number))
        by_place.update(drawn)
        return [place for place, own in drawn.items() if len({e.reward for e in own}) == 1]

    def close(self) -> None:
        """Wait until sampling is finished, and close the task. Safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.task.close()


def _agreed(generator: Generator, work: Callable[[], T], *, is_last: bool) -> list[T]:
    """Return the results of `work` on all ranks; if `work` raises on one rank, all ranks raise.

    If `is_last`, return only this rank's result, because no other rank needs it. A rank that generates
    alone does not communicate, because it may sample in a background thread.
    """
    return [work()] if _num_together(generator) == 1 or is_last else on_all_ranks(work)


def _num_together(generator: Generator) -> int:
    """Return the number of consecutive ranks that have to call `generate` together."""
    return num_ranks() if generator.is_collective else generator.ranks_per_copy


def _shares(n_places: int, together: int) -> tuple[range, Sequence[int]]:
    """Return this rank's places (prompt indices), and the places of all ranks that generate with it."""
    rank, n_ranks = dist.get_rank() if dist.is_initialized() else 0, num_ranks()

    def places_of(first: int, n: int) -> range:
        return range(n_places * first // n_ranks, n_places * (first + n) // n_ranks)

    return places_of(rank, 1), places_of(rank // together * together, together)


Share = list[Episode] | str
"""A rank's episodes, or the text of the exception that its draw raised."""


def _of_all_ranks(draw: Callable[[], list[Episode]]) -> list[Episode]:
    """Return the episodes of all ranks; if `draw` raises on one rank, every rank raises. Collective."""
    failure = None
    try:
        own: Share = draw()
    except Exception as error:
        # Raise below, after the other ranks know about the failure.
        own, failure = repr(error), error
    shares = all_ranks(own)
    if failure is not None:
        raise failure
    return episodes_of(shares)


def episodes_of(shares: Sequence[Share], first_rank: int = 0) -> list[Episode]:
    """Join the shares of consecutive ranks, beginning with `first_rank`; RunError if a rank failed."""
    episodes: list[Episode] = []
    for rank, share in enumerate(shares, start=first_rank):
        if isinstance(share, str):
            raise RunError(f"rank {rank} could not draw or grade its episodes: {share}")
        episodes += share
    return episodes


# ---- one episode ----


@dataclass
class _Dialogue:
    """An unfinished episode.

    place: index of the prompt in its step. row: index of the episode among all ranks' episodes.
    tokens: (id, log-prob, loss mask, version) of all tokens after the prompt, as in `Episode`.
    is_out_of_room: True if the episode ended because a reply and another turn would not fit.
    """

    prompt: Prompt
    place: int
    row: int
    completions: list[Completion] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    tokens: list[tuple[int, float, int, int]] = field(default_factory=list)
    is_out_of_room: bool = False

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt.token_ids, *(token[0] for token in self.tokens))

    def complete(self, completion: Completion) -> None:
        ids, logprobs = completion.token_ids, completion.token_logprobs
        if not len(ids) == len(logprobs) > 0:
            raise ValueError(
                f"a completion needs tokens, and one log-prob per token, got {len(ids)} tokens and "
                f"{len(logprobs)} log-probs; correct the generator"
            )
        self.completions.append(completion)
        versions = completion.token_versions or (completion.policy_version,) * len(ids)
        self.tokens += zip(ids, logprobs, (1,) * len(ids), versions, strict=True)

    def reply(self, text: str, token_ids: Sequence[int]) -> None:
        # On this rank, dialogues of other ranks have no turns.
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reply=text)
        self.tokens += [(token, 0.0, 0, -1) for token in token_ids]

    def episode(self, grade: Grade, *, several_turns: bool) -> Episode:
        """Return the graded episode. several_turns: the request allowed more than one turn."""
        scores, n_turns = grade.scores, len(self.turns)
        if several_turns:
            scores = scores | {"turns": n_turns, "out_of_room": float(self.is_out_of_room)}
        said = chain.from_iterable((turn.text, turn.reply) for turn in self.turns)
        token_ids, logprobs, mask, versions = zip(*self.tokens, strict=True)
        return Episode(
            group_id=self.place,
            prompt=self.prompt.text,
            prompt_token_ids=tuple(self.prompt.token_ids),
            expected_answer=self.prompt.answer,
            text=self.turns[-1].text,
            token_ids=token_ids,
            token_log_probs=logprobs,
            policy_version=min(part.policy_version for part in self.completions),
            finish_reason="length" if self.is_out_of_room else self.completions[-1].finish_reason,
            reward=grade.reward,
            scores=scores,
            loss_mask=mask if n_turns > 1 else None,
            turns=tuple(text for text in said if text is not None) if several_turns else (),
            token_versions=versions if len(set(versions) - {-1}) > 1 else None,
            routed_experts=_joined_experts([part.routed_experts for part in self.completions]),
        )


def _joined_experts(of_turns: Sequence[Tensor | None]) -> Tensor | None:
    """Join the experts of the turns; a token keeps the experts from the first turn that recorded it.

    of_turns: for each turn, [n, MoE layers, experts per token] for the n tokens before the turn's last.
    """
    joined = of_turns[0]
    for experts in of_turns[1:]:
        if joined is not None and experts is not None:
            joined = torch.cat([joined, experts[len(joined) :]])
    return joined


def _graded(
    task: Task, dialogues: Sequence[_Dialogue], *, several_turns: bool = False
) -> list[Episode]:
    pairs = [(dialogue.prompt, dialogue.turns) for dialogue in dialogues]
    grades = list(task.grade_episodes(pairs))
    if len(grades) != len(pairs) or not all(isinstance(grade, Grade) for grade in grades):
        kinds = sorted({type(grade).__name__ for grade in grades})
        raise ValueError(
            f"grading must return a Grade for each of {len(pairs)} completions, got {len(grades)} of "
            f"type {', '.join(kinds)}; correct {type(task).__name__}"
        )
    both = zip(dialogues, grades, strict=True)
    return [dialogue.episode(grade, several_turns=several_turns) for dialogue, grade in both]


def _text_and_stop(
    task: Task, completion: Completion, stop_strings: Sequence[str]
) -> tuple[str, str]:
    """Return a completion's text without the stop that ended it, and the text of the stop."""
    decode = task.tokenizer.decode
    text = decode(list(completion.token_ids))
    if completion.finish_reason != "stop":
        return text, ""
    ends = [text.index(string) for string in stop_strings if string in text]
    if ends:
        return text[: min(ends)], text[min(ends) :]
    # Only replies need the stop's text, and not all tokenizers have `skip_special_tokens`.
    stop = decode([completion.token_ids[-1]], skip_special_tokens=False) if task.replies else ""
    return decode(list(completion.token_ids[:-1])), stop


def with_advantages(episodes: Sequence[Episode], estimate: AdvantageEstimator) -> list[Episode]:
    """Return the episodes with their advantages; needs all completions of each prompt."""
    advantages = estimate([e.reward for e in episodes], [e.group_id for e in episodes])
    pairs = zip(episodes, advantages, strict=True)
    return [replace(episode, advantage=advantage) for episode, advantage in pairs]


# ---- step by step ----


class Rollouts:
    """Draws and grades a task's episodes, step by step.

    longest_episode: length limit of an episode in tokens, prompt included.
    """

    def __init__(
        self, task: Task, config: RL, draws: DrawsEpisodes, longest_episode: int | None = None
    ):
        self.task, self.config, self._draws = task, config, draws
        stops = sorted(set(config.sampling.stop_token_ids) | ({task.tokenizer.eos_id} - {None}))
        # `Request` has the stop strings, because in `SamplingConfig` they need `decode`, which is not sent.
        settings = vars(config.sampling) | {"stop_token_ids": tuple(stops), "stop_strings": ()}
        self.sampling = SamplingConfig(**settings)
        penalty = self.sampling.max_tokens, config.overlong_tokens, config.overlong_penalty
        self._request = Request(  # `tries` is empty here; each step sends a copy with its own tries
            (),
            config.num_samples_per_prompt,
            OverlongPenalty(*penalty) if config.overlong_tokens else None,
            tuple(config.sampling.stop_strings),
            config.task.max_turns,
            longest_episode,
        )
        self._next_step = 1
        # step -> the function that waits for the step's episodes
        self._ahead: dict[int, Callable[[], list[Episode]]] = {}
        # step -> the task's state before the step's prompts were taken
        self._task_before: dict[int, dict[str, Any]] = {}
        # Steps with episodes from a checkpoint, which may be older than `rl.async_steps` allows.
        self.restored_steps: frozenset[int] = frozenset()

    # ---- training ----

    def skip_to(self, step: int) -> None:
        """Skip the steps before `step`: take no prompts and generate no episodes for them."""
        self._next_step = max(self._next_step, step)

    def start_until(self, last_step: int) -> None:
        """Start sampling for each step up to and including `last_step` that has not started yet."""
        for step in range(self._next_step, last_step + 1):
            self._task_before[step] = self.task.state_dict()
            tries = []
            for number in range(1 + self.config.redraws):
                sampling = self._seeded(f"{step} again {number}" if number else step)
                tries.append(Try(self.task.sample(self.config.num_prompts_per_step), sampling))
            self._ahead[step] = self._draws.begin(replace(self._request, tries=tries))
            self._next_step = step + 1

    def take(self, step: int) -> list[Episode]:
        """Wait for a step's episodes, and return the episodes of all ranks. Collective.

        Take steps in order.
        """
        episodes = self._ahead[step]()
        del self._ahead[step]
        self._task_before.pop(step, None)
        return episodes

    # ---- evaluation ----

    def of_held_out(self, *, greedy: bool) -> list[Episode]:
        """Return one episode per held-out prompt, drawn with a fixed seed or `greedy`. Collective."""
        prompts = self.task.held_out(self.config.eval_samples)
        if not prompts:
            raise ValueError(
                f"{type(self.task).__name__} has no held-out prompt to evaluate on; add one to it, or "
                "set rl.eval_every to 0"
            )
        sampling = self._seeded("evaluation")
        if greedy:
            sampling = replace(sampling, temperature=0.0)
        request = replace(
            self._request, tries=[Try(prompts, sampling)], num_samples=1, penalty=None
        )
        return self._draws.begin(request)()

    def _seeded(self, place: Any) -> SamplingConfig:
        seed = random.Random(f"{self.config.seed} {place}").getrandbits(63)
        return replace(self.sampling, seed=seed)

    # ---- state ----

    def close(self) -> None:
        """Wait until sampling is finished. Safe to call twice."""
        self._draws.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the next step, and the episodes that were drawn ahead. Collective.

        Episodes are saved because the weights that drew them are not. If episodes are lost with a generating
        rank, this method raises LostGeneratorError, unless `rl.async_steps` is 0: then a resumed run draws
        the episodes again.
        """
        taken: dict[int, list[Episode]] = {}
        for step in list(self._ahead):
            try:
                taken[step] = self.take(step)
            except LostGeneratorError:
                if self.config.async_steps:
                    raise
                self.task.load_state_dict(self._task_before[step])
                self._next_step = step
                break
        self._keep(taken)
        pending = [[step, [e.to_dict() for e in episodes]] for step, episodes in taken.items()]
        return {"next_step": self._next_step, "pending": pending}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next_step = state_dict["next_step"]
        self._keep({n: [Episode.from_dict(e) for e in own] for n, own in state_dict["pending"]})
        self.restored_steps = frozenset(self._ahead)

    def _keep(self, taken: dict[int, list[Episode]]) -> None:
        """Make `take` return these episodes for their steps."""
        self._ahead = {step: lambda e=episodes: e for step, episodes in taken.items()}
