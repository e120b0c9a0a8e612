"""From completions to graded episodes, and the log of them."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

import torch.distributed as dist

from torchtitan.rl.advantages import AdvantageEstimator
from torchtitan.rl.tasks import Prompt, Task, failed_grading
from torchtitan.rl.types import Completion, Episode


def make_episodes(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    first_group: int = 0,
) -> list[Episode]:
    """Return the graded episodes of completions, equally many for each prompt, in their order.

    completions: all of the first prompt, then all of the second, and so on.
    first_group: the group id of the first prompt; the others count on from it.
    Raises ValueError if the completions cannot be dealt to the prompts.
    """
    per_prompt = len(completions) // max(len(prompts), 1)
    if per_prompt * len(prompts) != len(completions):
        raise ValueError(
            f"every prompt must have equally many completions, got {len(completions)} for "
            f"{len(prompts)} prompts"
        )
    return [
        _graded(task, prompts[i // per_prompt], completion, first_group + i // per_prompt)
        for i, completion in enumerate(completions)
    ]


def _graded(task: Task, prompt: Prompt, completion: Completion, group_id: int) -> Episode:
    # The stop token ends the answer and is no part of it.
    n_text = len(completion.token_ids) - (completion.finish_reason == "stop")
    text = task.tokenizer.decode(list(completion.token_ids[:n_text]))
    try:
        grade = task.grade(prompt, text)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise failed_grading(error, prompt, text) from error
    return Episode(
        group_id=group_id,
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


def with_advantages(episodes: Sequence[Episode], estimate: AdvantageEstimator) -> list[Episode]:
    """The same episodes with their advantages; all completions of a prompt have to be there."""
    advantages = estimate([e.reward for e in episodes], [e.group_id for e in episodes])
    return [
        replace(episode, advantage=advantage)
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]


class EpisodeLog:
    """Appends episodes to a file, one JSON object per line, on rank 0 alone.

    A line holds the step and the entries of `Episode`. The file is opened at the first write; a
    run that continues from a checkpoint goes on in it, and steps done twice are in it twice.

    path: the file. limit: episodes per step; -1 is all, 0 none.
    """

    def __init__(self, path: str, limit: int = -1) -> None:
        self.path, self.limit = path, limit
        self._file: TextIO | None = None

    def write(self, step: int, episodes: Sequence[Episode]) -> None:
        """Append the first episodes of a step."""
        if self.limit == 0 or (dist.is_initialized() and dist.get_rank() != 0):
            return
        if self._file is None:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")
        chosen = episodes if self.limit < 0 else episodes[: self.limit]
        for episode in chosen:
            self._file.write(json.dumps({"step": step, **episode.to_dict()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Safe to call twice; a later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
