"""Collecting rollouts: prompts are completed, completions are graded, and all ranks get them all.

Each rank draws and grades a share of the completions. What is drawn depends on `rl.seed`, the step
and the place in it, not on the rank or the time: a resumed run draws the same, and so does another
layout.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan.distributed.ranks import all_ranks, on_all_ranks
from torchtitan.rl.advantages import AdvantageEstimator, OverlongPenalty
from torchtitan.rl.generator import Generator
from torchtitan.rl.job_config import RL
from torchtitan.rl.tasks import Prompt, Task
from torchtitan.rl.types import Completion, Episode, SamplingConfig
from torchtitan.tools.errors import LostConnectionError, RunError
from torchtitan.tools.utils import use_device


class LostGeneratorError(LostConnectionError):
    """A rank that generates is gone."""


class Try(NamedTuple):
    """A prompt for each place in a step, and how to complete them."""

    prompts: Sequence[Prompt]
    sampling: SamplingConfig


@dataclass(frozen=True)
class Request:
    """What to draw: `num_samples` episodes for each place, with the place as their group.

    tries: the next one is for places whose completions all got one reward.
    penalty: what long completions lose; None takes rewards as they are.
    stop_strings: that end a completion; those of the tries don't count.
    """

    tries: Sequence[Try]
    num_samples: int
    penalty: OverlongPenalty | None = None
    stop_strings: tuple[str, ...] = ()

    def with_extras(self, episode: Episode, number: int) -> Episode:
        """An episode of a try, by its number, with what the request adds to its grade."""
        if len(self.tries) > 1:
            episode = replace(episode, scores=episode.scores | {"redraws": number})
        if self.penalty is not None:
            penalty = self.penalty(len(episode.token_ids))
            scores = episode.scores | {"overlong_penalty": penalty}
            episode = replace(episode, reward=episode.reward - penalty, scores=scores)
        return episode


class Draws:
    """Has a generator of these ranks complete prompts, and grades what it draws.

    ahead: draw on a thread, while the trainer works. device: what is drawn on.
    """

    def __init__(self, task: Task, generator: Generator, device: torch.device, *, ahead: bool):
        self.task, self._generator = task, generator
        self._thread = None
        if ahead:
            self._thread = ThreadPoolExecutor(
                1, "rollouts", initializer=use_device, initargs=(device,)
            )

    def begin(self, request: Request) -> Callable[[], list[Episode]]:
        """Have the thread draw this rank's share with today's weights; returns what waits for it.

        Without a thread it is drawn when it is waited for.
        """
        draw = partial(self._draw, self._generator.pinned(), request)
        return draw if self._thread is None else self._thread.submit(draw).result

    def _draw(self, generator: Generator, request: Request) -> list[Episode]:
        """This rank's share of a request, in the order of places.

        What a rank draws again depends on its own places only, so the thread needs no other rank,
        unless ranks generate together.
        """
        n_tries, n_together = len(request.tries), _num_together(generator)
        by_place: dict[int, list[Episode]] = {}

        def attempt(number: int, places: Sequence[int]) -> list[int]:
            """Draw and grade; returns those of this rank's places that are worth another try."""
            drawn: dict[int, list[Episode]] = {}
            for episode in self._complete(generator, request, number, places):
                found = drawn.setdefault(episode.group_id, [])
                found.append(request.with_extras(episode, number))
            by_place.update(drawn)
            return [place for place, own in drawn.items() if len({e.reward for e in own}) == 1]

        places: Sequence[int] = range(len(request.tries[0].prompts))
        for number in range(n_tries):
            if number + 1 < n_tries and n_together > 1:
                # A rank that cannot grade must not leave the others in the next try.
                flat = on_all_ranks(partial(attempt, number, places))
                places = sorted(place for of_rank in flat for place in of_rank)
            else:
                places = attempt(number, places)
            if not places:
                break
        return [episode for place in sorted(by_place) for episode in by_place[place]]

    def _complete(
        self, generator: Generator, request: Request, number: int, places: Sequence[int]
    ) -> list[Episode]:
        """Complete the prompts of a try at these places, and grade this rank's share.

        Only the rank that drew a completion grades it: a reward function may be slow or random.
        """
        (prompts, sampling), n_samples = request.tries[number], request.num_samples
        stops, decode = request.stop_strings, self.task.tokenizer.decode
        sampling = replace(sampling, stop_strings=stops, decode=decode)
        # Each rank has a run of consecutive places; those of all ranks in order are all of them.
        rank = dist.get_rank() if dist.is_initialized() else 0
        n, n_ranks, together = len(prompts), _num_ranks(), _num_together(generator)
        share = range(n * rank // n_ranks, n * (rank + 1) // n_ranks)
        first = rank // together * together
        share_together = range(n * first // n_ranks, n * (first + together) // n_ranks)
        own = [place for place in places if place in share]
        asked = [place for place in places if place in share_together]
        completions = generator.generate(
            [prompts[place].token_ids for place in asked],
            sampling,
            n_samples,
            first_row=[place * n_samples for place in asked],
        )
        start = asked.index(own[0]) * n_samples if own else 0
        episodes = make_episodes(
            self.task,
            [prompts[place] for place in own],
            completions[start : start + len(own) * n_samples],
            stop_strings=stops,
        )
        return [replace(episode, group_id=own[episode.group_id]) for episode in episodes]

    def of_all_ranks(self, share: Callable[[], list[Episode]]) -> list[Episode]:
        """The episodes of all ranks, in rank order. Collective.

        If this rank's share cannot be drawn, such as for a reward function, every rank raises.
        """
        return _gathered(share)

    def close(self) -> None:
        """Finish what is being drawn, and the task's processes. Safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.task.close()


class Rollouts:
    """Graded episodes of a task, step by step.

    config: the section `[rl]`.
    """

    def __init__(self, task: Task, config: RL, draws: Draws):
        self.task, self.config, self._draws = task, config, draws
        eos_id = task.tokenizer.eos_id
        stops = set(config.sampling.stop_token_ids) | ({eos_id} - {None})
        settings = vars(config.sampling) | {
            "stop_token_ids": tuple(sorted(stops)),
            "stop_strings": (),  # a Request has them apart: a tokenizer does not travel
        }
        self.sampling = SamplingConfig(**settings)
        self._penalty = None
        if config.overlong_tokens:
            self._penalty = OverlongPenalty(
                self.sampling.max_tokens, config.overlong_tokens, config.overlong_penalty
            )
        self._next_step = 1
        # step -> its episodes, or what returns or raises this rank's share of them
        self._ahead: dict[int, list[Episode] | Callable[[], list[Episode]]] = {}
        # step -> the task's state before its prompts were taken
        self._task_before: dict[int, dict[str, Any]] = {}
        # Steps that an earlier run drew ahead, as far as its `rl.async_steps` allowed.
        self.restored_steps: frozenset[int] = frozenset()

    # ---- training ----

    def skip_to(self, step: int) -> None:
        """Begin with this step, or later."""
        self._next_step = max(self._next_step, step)

    def start_until(self, last_step: int) -> None:
        """Begin to draw all steps up to this one that were not begun before."""
        while self._next_step <= last_step:
            self._task_before[self._next_step] = self.task.state_dict()
            request = Request(
                [self._next_try(number) for number in range(1 + self.config.redraws)],
                self.config.num_samples_per_prompt,
                self._penalty,
                tuple(self.config.sampling.stop_strings),
            )
            self._ahead[self._next_step] = self._draws.begin(request)
            self._next_step += 1

    def _next_try(self, number: int) -> Try:
        seed = self._seed(f"{self._next_step} again {number}" if number else self._next_step)
        prompts = self.task.sample(self.config.num_prompts_per_step)
        return Try(prompts, replace(self.sampling, seed=seed))

    def take(self, step: int) -> list[Episode]:
        """The step's episodes of all ranks. Collective; steps are taken in order."""
        episodes = self._ahead[step]
        if not isinstance(episodes, list):
            episodes = self._draws.of_all_ranks(episodes)
        del self._ahead[step]
        self._task_before.pop(step, None)
        return episodes

    # ---- evaluation ----

    def of_held_out(self, *, greedy: bool) -> list[Episode]:
        """One episode for each held-out prompt, of all ranks; the same prompts and draws each time.

        greedy: take the likeliest token; False samples as in training.
        """
        prompts = self.task.held_out(self.config.eval_samples)
        temperature = 0.0 if greedy else self.sampling.temperature
        sampling = replace(self.sampling, temperature=temperature, seed=self._seed("evaluation"))
        stops = tuple(self.config.sampling.stop_strings)
        request = Request([Try(prompts, sampling)], 1, stop_strings=stops)
        return self._draws.of_all_ranks(self._draws.begin(request))

    def _seed(self, place: Any) -> int:
        return random.Random(f"{self.config.seed} {place}").getrandbits(63)

    # ---- state ----

    def close(self) -> None:
        """Finish what is being drawn. Safe to call twice."""
        self._draws.close()

    def state_dict(self) -> dict[str, Any]:
        """Where to go on, and the episodes that were drawn ahead. Collective.

        The weights that drew these will be gone, so they cannot be drawn again. Where the
        generator is gone, too, the run goes on with other episodes of the same prompts.
        """
        taken: dict[int, list[Episode]] = {}
        for step in list(self._ahead):
            try:
                taken[step] = self.take(step)
            except LostGeneratorError:
                self.task.load_state_dict(self._task_before[step])
                self._next_step = step
                break
        self._ahead = dict(taken)
        pending = [[step, [e.to_dict() for e in episodes]] for step, episodes in taken.items()]
        return {"next_step": self._next_step, "pending": pending}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next_step = state_dict["next_step"]
        self._ahead = {
            step: [Episode.from_dict(values) for values in episodes]
            for step, episodes in state_dict["pending"]
        }
        self.restored_steps = frozenset(self._ahead)


def make_episodes(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    stop_strings: Sequence[str] = (),
) -> list[Episode]:
    """Return the graded episodes of completions, equally many for each prompt, in their order.

    completions: all of the first prompt, group 0, then all of the second, and so on.
    stop_strings: that end a completion; the text that is graded ends before them.
    Raises ValueError if the completions cannot be divided equally, or grading fails.
    """
    per_prompt = len(completions) // max(len(prompts), 1)
    if per_prompt * len(prompts) != len(completions):
        raise ValueError(
            f"every prompt must have equally many completions, got {len(completions)} for "
            f"{len(prompts)} prompts"
        )
    texts = [_text(task, completion, stop_strings) for completion in completions]
    pairs = [(prompts[i // per_prompt], text) for i, text in enumerate(texts)]
    episodes = []
    grades = task.grade_all(pairs)
    for i, (completion, (prompt, text), grade) in enumerate(
        zip(completions, pairs, grades, strict=True)
    ):
        episode = Episode(
            group_id=i // per_prompt,
            prompt=prompt.text,
            prompt_token_ids=tuple(prompt.token_ids),
            expected_answer=prompt.answer,
            text=text,
            token_ids=tuple(completion.token_ids),
            token_log_probs=tuple(completion.token_logprobs),
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            reward=grade.reward,
            scores=grade.scores,
        )
        episodes.append(episode)
    return episodes


def _text(task: Task, completion: Completion, stop_strings: Sequence[str]) -> str:
    """A completion's text, without what ended it."""
    text = task.tokenizer.decode(list(completion.token_ids))
    if completion.finish_reason != "stop":
        return text
    ends = [text.index(string) for string in stop_strings if string in text]
    return text[: min(ends)] if ends else task.tokenizer.decode(list(completion.token_ids[:-1]))


def with_advantages(episodes: Sequence[Episode], estimate: AdvantageEstimator) -> list[Episode]:
    """The same episodes with their advantages; needs all completions of each prompt."""
    advantages = estimate([e.reward for e in episodes], [e.group_id for e in episodes])
    pairs = zip(episodes, advantages, strict=True)
    return [replace(episode, advantage=advantage) for episode, advantage in pairs]


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _num_together(generator: Generator) -> int:
    """How many consecutive ranks have to ask for the same completions."""
    return _num_ranks() if generator.is_collective else generator.ranks_per_copy


def _gathered(draw: Callable[[], list[Episode]]) -> list[Episode]:
    """What `draw` returns on all ranks, in rank order.

    If it raises on one rank, such as in a reward function, every rank raises.
    """
    if _num_ranks() == 1:
        return draw()
    own: list[Episode] = []
    failure: Exception | None = None
    try:
        own = draw()
    except Exception as error:  # raised below, after the other ranks know
        failure = error
    shares = all_ranks((own, None if failure is None else repr(failure)))
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(shares):
        if text is not None:
            raise RunError(f"rank {rank} could not draw or grade its episodes: {text}")
    return [episode for share, _ in shares for episode in share]
