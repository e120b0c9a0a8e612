"""Episodes of several turns: sampling, replies, training and scores."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.unit.rl.toy import toy_config
from torchtitan.experiments.rl_toy.tasks import GuessTask
from torchtitan.rl.generator import Generator
from torchtitan.rl.jsonl_task import JsonlTask
from torchtitan.rl.rollout import Draws, Rollouts
from torchtitan.rl.tasks import Prompt
from torchtitan.rl.types import Completion, Episode, TrainingSample

STOPS = ["--rl.sampling.stop_token_ids", *map(str, range(1, 9))]  # so that random turns end
GUESS = ["--rl.task.name=guess", "--rl.task.max_turns=3"]


class Scripted(Generator):
    """Writes the text that `policy` returns for the text so far; a final "!" marks a cut-off turn."""

    weight_names = "ours"

    def __init__(self, tokenizer, policy: Callable[[str], str]):
        self.tokenizer, self.policy, self.policy_version = tokenizer, policy, 5
        self.calls: list[tuple[int, list[int]]] = []

    def _draw(self, prompts, sampling, num_samples, rows):
        self.calls.append((sampling.seed, list(rows)))
        completions = []
        for prompt in (prompt for prompt in prompts for _ in range(num_samples)):
            text = self.policy(self.tokenizer.decode(list(prompt)))
            ids = self.tokenizer.encode(text.rstrip("!"), add_special_tokens=False)
            ids += [self.tokenizer.eos_id] * (not text.endswith("!"))
            reason = "stop" if sampling.stops_at(ids) else "length"
            completions.append(Completion(tuple(ids), (-0.5,) * len(ids), reason, 5))
        return completions

    def update_weights(self, weights=None, *, check_digest=True): ...


def bisect(dialogue: str) -> str:
    """The best next guess of a number from 0 to 6: "?3>5" is followed by "4" or "6"."""
    low, high, guess = 0, 6, 3
    for number, reply in zip(dialogue[1::2], dialogue[2::2], strict=True):
        low, high = (int(number) + 1, high) if reply == ">" else (low, int(number) - 1)
        guess = (low + high) // 2
    return str(guess)


def draw(task, generator, tmp_path, *overrides, longest=None) -> list[Episode]:
    """One episode for each of 30 held-out prompts."""
    config = toy_config(tmp_path, *GUESS, "--rl.eval_samples=30", *overrides).rl
    draws = Draws(task, generator, torch.device("cpu"), ahead=False)
    return Rollouts(task, config, draws, longest).of_held_out(greedy=False)


def test_policy_that_bisects_finds_every_number_and_only_its_tokens_count(tmp_path):
    task = GuessTask(value_max=6)
    episodes = draw(task, Scripted(task.tokenizer, bisect), tmp_path)
    # By hand: 3 is found at once, 1 and 5 with the second guess, the others with the third.
    n_guesses = {"3": 1, "1": 2, "5": 2, "0": 3, "2": 3, "4": 3, "6": 3}
    assert {e.expected_answer for e in episodes} == set(n_guesses)
    eos = task.tokenizer.eos_id
    for episode in episodes:
        n = n_guesses[episode.expected_answer]
        assert (episode.reward, episode.scores["turns"], episode.finish_reason) == (1, n, "stop")
        assert episode.turns[0::2][-1] == episode.text == episode.expected_answer
        answer = int(episode.expected_answer)
        replies = ["<" if answer < int(guess) else ">" for guess in episode.turns[::2]]
        assert list(episode.turns[1::2]) == replies[: n - 1]
        tokens = map(task.tokenizer.encode, episode.turns)
        written = [id for i, own in enumerate(tokens) for id in own + [eos] * (i % 2 == 0)]
        assert list(episode.token_ids) == written
        assert episode.turn_lengths == [2] * n
        mask = ([1, 1, 0] * n)[:-1]
        assert episode.token_log_probs == tuple(-0.5 * m for m in mask)
        sample = TrainingSample.from_episode(Episode(**vars(episode) | {"advantage": 2.0}))
        assert sample.loss_mask.tolist() == mask
        assert sample.labels.tolist() == written
    assert all(Episode.from_dict(e.to_dict()) == e for e in episodes)
    for text, reason in (("0!", "length"), ("<", "stop"), ("", "stop")):
        episodes = draw(task, Scripted(task.tokenizer, lambda _, text=text: text), tmp_path)
        assert {(e.scores["turns"], e.finish_reason) for e in episodes} == {(1, reason)}
        assert all(e.loss_mask is None for e in episodes)


def test_each_turn_has_draws_of_its_own_which_follow_from_the_step_and_the_row(tmp_path):
    task = GuessTask(value_max=6)
    generator, again = (Scripted(task.tokenizer, bisect) for _ in range(2))
    episodes = draw(task, generator, tmp_path)
    for n, (_, rows) in enumerate(generator.calls):
        assert rows == [row for row, e in enumerate(episodes) if e.scores["turns"] > n]
    assert len({seed for seed, _ in generator.calls}) == 3
    assert draw(task, again, tmp_path) == episodes and again.calls == generator.calls
    # The first turn is the same as in a task without replies.
    alone = Scripted(task.tokenizer, bisect)
    draw(task, alone, tmp_path, "--rl.task.max_turns=1")
    assert alone.calls == generator.calls[:1]


class Updated(Scripted):
    """A generator whose weights are replaced after each turn."""

    def _draw(self, *arguments):
        completions = super()._draw(*arguments)
        self.policy_version += 1
        return [dataclasses.replace(c, policy_version=self.policy_version) for c in completions]


def test_each_sample_of_each_prompt_gets_replies_of_its_own_and_knows_its_oldest_weights(tmp_path):
    task = GuessTask(value_max=6)
    draws = Draws(task, Updated(task.tokenizer, bisect), torch.device("cpu"), ahead=False)
    rollouts = Rollouts(task, toy_config(tmp_path, *GUESS).rl, draws)
    rollouts.start_until(1)
    episodes = rollouts.take(1)
    assert [e.group_id for e in episodes] == [place for place in range(4) for _ in range(4)]
    assert {e.reward for e in episodes} == {1}  # this policy finds what the replies are about
    assert {e.policy_version for e in episodes} == {6}
    longest = max(episodes, key=lambda episode: len(episode.token_ids))
    assert longest.token_versions == (6, 6, -1, 7, 7, -1, 8, 8)
    # Steps that were drawn ahead are not drawn again.
    for skip_to, start_until, n_steps_drawn in ((1, 3, 3), (2, 3, 3), (5, 5, 4)):
        rollouts.skip_to(skip_to)
        rollouts.start_until(start_until)
        assert task.state_dict() == {"num_drawn": 4 * n_steps_drawn}


def test_episode_whose_next_turn_would_not_fit_ends_and_is_counted(tmp_path):
    task = GuessTask(value_max=6)
    # "?", two turns of 2 tokens, a reply of 1: the third would need another reply and max_tokens.
    for longest, n_turns in ((6 + 1 + 4, 3), (6 + 1 + 3, 2), (1 + 2 + 1 + 3, 1)):
        episodes = draw(task, Scripted(task.tokenizer, bisect), tmp_path, longest=longest)
        assert max(e.scores["turns"] for e in episodes) == n_turns
        ended = [e for e in episodes if e.scores["out_of_room"]]
        ends = {(e.scores["turns"], e.finish_reason, e.reward) for e in ended}
        assert ends == ({(n_turns, "length", 0.0)} if n_turns < 3 else set())
        assert all(len(e.token_ids) + 1 <= longest for e in episodes)


class Pieces:
    """A tokenizer that encodes "ab" as one token."""

    eos_id = 0
    words = {"ab": 1, "a": 2, "b": 3, "?": 4, "-": 5}
    encoded: list[str]

    def __init__(self):
        self.encoded = []

    def encode(self, text, **options):
        self.encoded.append(text)
        assert options in ({}, {"add_bos": False, "add_eos": False, "add_special_tokens": False})
        return [self.words[text]]

    def decode(self, ids, **_):
        names = {i: word for word, i in self.words.items()}
        return "".join(names.get(i, "") for i in ids)


def test_sampled_tokens_are_kept_as_they_were_sampled(tmp_path):
    """Encoding "ab" again would give another token."""
    task = GuessTask()
    task.tokenizer = tokenizer = Pieces()
    task.held_out = lambda n: [Prompt("?", (4,), "ab")]
    task.reply = lambda prompt, turns: "-" if len(turns) == 1 else None
    generator, contexts = Scripted(tokenizer, str), []

    def sample(prompts, sampling, num_samples, rows):
        contexts.append([tuple(prompt) for prompt in prompts])
        return [Completion((2, 3, 0), (-1.0, -2.0, -3.0), "stop", 5)]

    generator._draw = sample
    (episode,) = draw(task, generator, tmp_path)
    assert contexts == [[(4,)], [(4, 2, 3, 0, 5)]]
    assert episode.token_ids == (2, 3, 0, 5, 2, 3, 0)
    assert episode.token_log_probs == (-1, -2, -3, 0, -1, -2, -3)
    assert tokenizer.encoded == ["-"] and episode.turns == ("ab", "-", "ab")


def test_reply_without_a_token_and_a_failing_one_are_told(tmp_path):
    task = GuessTask()
    task.reply = lambda prompt, turns: ""
    generator = Scripted(task.tokenizer, lambda _: "1")
    with pytest.raises(ValueError, match="must have a token, got ''"):
        draw(task, generator, tmp_path)
    task.reply = lambda prompt, turns: 1 / 0
    with pytest.raises(ValueError, match="a reply failed at .*ZeroDivisionError.*correct the task"):
        draw(task, generator, tmp_path)


@pytest.mark.parametrize(("token_ids", "got"), [((), "0 tokens and 0"), ((1, 2), "2 tok")])
def test_completion_without_tokens_or_log_probs_is_refused(token_ids, got, tmp_path):
    task = GuessTask()
    generator = Scripted(task.tokenizer, str)
    generator._draw = lambda prompts, *_: [Completion(token_ids, (), "stop", 5) for _ in prompts]
    with pytest.raises(ValueError, match=f"one log-prob per token, got {got}.*correct the gener"):
        draw(task, generator, tmp_path)


def test_reward_function_of_a_file_may_see_the_turns(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "?", "answer": "4"}\n')

    class Hints(JsonlTask):
        def reply(self, prompt, turns):
            return ">" if turns[-1].text == "3" else None

    def reward(text, answer, turns):
        assert turns == [("3", ">"), (text, None)]  # all its turns
        return 0.5 * (text == answer)

    task = Hints(str(tmp_path / "p.jsonl"), reward, GuessTask().tokenizer)
    policy = {"?": "3", "?3>": "4"}
    (episode,) = draw(task, Scripted(task.tokenizer, policy.__getitem__), tmp_path)
    assert (episode.reward, episode.scores["exact"]) == (0.5, 1)
