"""Collecting rollouts: prompts are completed, completions are graded, and all ranks get them all.

Each rank draws and grades a share of the completions. What is drawn depends on `rl.seed`, the step
and the place in it, not on the rank or the time: a resumed run draws the same, and so does another
layout.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.distributed.ranks import all_ranks, on_all_ranks
from torchtitan.rl.advantages import AdvantageEstimator, OverlongPenalty
from torchtitan.rl.generator import Generator
from torchtitan.rl.job_config import RL
from torchtitan.rl.tasks import Prompt, Task
from torchtitan.rl.types import Completion, Episode, SamplingConfig
from torchtitan.tools.errors import RunError
from torchtitan.tools.utils import use_device


class Rollouts:
    """Graded episodes of a task, step by step; with `rl.async_steps` a thread draws them.

    config: the section `[rl]`. device: what is drawn on.
    """

    def __init__(self, task: Task, generator: Generator, config: RL, device: torch.device):
        self.task, self.generator, self.config = task, generator, config
        eos_id = task.tokenizer.eos_id
        stops = set(config.sampling.stop_token_ids) | ({eos_id} - {None})
        settings = vars(config.sampling) | {
            "stop_token_ids": tuple(sorted(stops)),
            "stop_strings": tuple(config.sampling.stop_strings),
            "decode": task.tokenizer.decode,
        }
        self.sampling = SamplingConfig(**settings)
        self.overlong_penalty = OverlongPenalty(
            self.sampling.max_tokens, config.overlong_tokens, config.overlong_penalty
        )
        self._thread = None
        if config.async_steps:
            self._thread = ThreadPoolExecutor(
                1, "rollouts", initializer=use_device, initargs=(device,)
            )
        self._next_step = 1
        # step -> its episodes, or what returns or raises this rank's share of them
        self._ahead: dict[int, list[Episode] | Callable[[], list[Episode]]] = {}
        # Steps that an earlier run drew ahead, as far as its `rl.async_steps` allowed.
        self.restored_steps: frozenset[int] = frozenset()

    # ---- training ----

    def skip_to(self, step: int) -> None:
        """Begin with this step, or later."""
        self._next_step = max(self._next_step, step)

    def start_until(self, last_step: int) -> None:
        """Begin to draw all steps up to this one that were not begun before."""
        while self._next_step <= last_step:
            n = self.config.num_prompts_per_step
            prompts = self.task.sample(n * (1 + self.config.redraws))
            tries = [prompts[first : first + n] for first in range(0, len(prompts), n)]
            draw = partial(self._draw, self._next_step, tries)
            # Without a thread it is drawn when it is taken.
            share = draw if self._thread is None else self._thread.submit(draw).result
            self._ahead[self._next_step] = share
            self._next_step += 1

    def take(self, step: int) -> list[Episode]:
        """The step's episodes of all ranks. Collective; steps are taken in order."""
        episodes = self._ahead.pop(step)
        return episodes if isinstance(episodes, list) else _gathered(episodes)

    def wait(self) -> None:
        """Wait until the thread has drawn every step that was begun; `take` raises its errors."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()  # after all that was submitted before

    def _draw(self, step: int, tries: Sequence[Sequence[Prompt]]) -> list[Episode]:
        """This rank's episodes of a step.

        tries: a prompt for each place in the step; the next one is for places whose completions all
            got one reward. What a rank draws again depends on its own places only, so the thread
            needs no other rank, unless generation does.
        """
        n_samples, places = self.config.num_samples_per_prompt, range(len(tries[0]))
        by_place: dict[int, list[Episode]] = {}

        def attempt(number: int, places: Sequence[int]) -> list[int]:
            """Draw and grade; returns those of this rank's places that are worth another try."""
            seed = self._seed(f"{step} again {number}" if number else step)
            sampling = replace(self.sampling, seed=seed)
            episodes = self._complete(tries[number], n_samples, sampling, places)
            for episode in episodes:
                own = by_place.setdefault(episode.group_id, [])
                if len(own) == n_samples:  # of the try before
                    own.clear()
                own.append(self._as_reinforced(episode, number))
            drawn = {episode.group_id for episode in episodes}
            return [i for i in drawn if len({e.reward for e in by_place[i]}) == 1]

        for number in range(len(tries)):
            if number + 1 < len(tries) and self.generator.is_collective:
                # A rank that cannot grade must not leave the others in the next try.
                flat = on_all_ranks(partial(attempt, number, places))
                places = sorted(place for of_rank in flat for place in of_rank)
            else:
                places = sorted(attempt(number, places))
            if not places:
                break
        return [episode for place in sorted(by_place) for episode in by_place[place]]

    def _as_reinforced(self, episode: Episode, number: int) -> Episode:
        """The episode with what training adds to its grade."""
        if self.config.redraws:
            episode = replace(episode, scores=episode.scores | {"redraws": number})
        if self.config.overlong_tokens:
            penalty = self.overlong_penalty(len(episode.token_ids))
            scores = episode.scores | {"overlong_penalty": penalty}
            episode = replace(episode, reward=episode.reward - penalty, scores=scores)
        return episode

    # ---- evaluation ----

    def of_held_out(self, *, greedy: bool) -> list[Episode]:
        """One episode for each held-out prompt, of all ranks; the same prompts and draws each time.

        greedy: take the likeliest token; False samples as in training.
        """
        prompts = self.task.held_out(self.config.eval_samples)
        temperature = 0.0 if greedy else self.sampling.temperature
        sampling = replace(self.sampling, temperature=temperature, seed=self._seed("evaluation"))
        return _gathered(lambda: self._complete(prompts, 1, sampling))

    # ---- both ----

    def _complete(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingConfig,
        places: Sequence[int] | None = None,
    ) -> list[Episode]:
        """Complete the prompts at these places (None: all), and grade this rank's share.

        Only the rank that drew a completion grades it: a reward function may be slow or random.
        """
        # Each rank has a run of consecutive places; those of all ranks in order are all of them.
        rank = dist.get_rank() if dist.is_initialized() else 0
        n, n_ranks = len(prompts), _num_ranks()
        share = range(n * rank // n_ranks, n * (rank + 1) // n_ranks)
        places = range(n) if places is None else places
        own = [place for place in places if place in share]
        asked = places if self.generator.is_collective else own
        completions = self.generator.generate(
            [prompts[i].token_ids for i in asked],
            sampling,
            num_samples,
            first_row=[i * num_samples for i in asked],
        )
        first = asked.index(own[0]) * num_samples if own else 0
        episodes = make_episodes(
            self.task,
            [prompts[i] for i in own],
            completions[first : first + len(own) * num_samples],
            stop_strings=self.config.sampling.stop_strings,
        )
        return [replace(episode, group_id=own[episode.group_id]) for episode in episodes]

    def _seed(self, place: Any) -> int:
        return random.Random(f"{self.config.seed} {place}").getrandbits(63)

    # ---- state ----

    def close(self) -> None:
        """Finish what is being drawn. Safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.task.close()

    def state_dict(self) -> dict[str, Any]:
        """Where to go on, and the episodes that were drawn ahead. Collective.

        The weights that drew these will be gone, so they cannot be drawn again.
        """
        self._ahead = {step: self.take(step) for step in list(self._ahead)}
        pending = [
            [step, [e.to_dict() for e in episodes]] for step, episodes in self._ahead.items()
        ]
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
