"""Ranks that generate beside ranks that train: the run is the same, and ends if a rank is lost."""

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rl_runs import LAYOUTS, numbers, run_on_this_rank
from tests.unit.rl.test_openai_generator import Weights
from tests.unit.rl.toy import toy_config
from torchtitan.config.checks import ConfigError
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.rl import disaggregated
from torchtitan.rl.controller import Controller, build_part
from torchtitan.rl.disaggregated import Link, RemoteGenerator
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.rollout import LostGeneratorError
from torchtitan.rl.weight_transport import ReceivedWeights, StagedWeights, WeightChanges
from torchtitan.testing.gloo import RankFailure, run_ranks

FSDP = LAYOUTS["FSDP"]
STEPS = ["--training.steps=4", "--rl.eval_every=2", "--rl.eval_samples=5"]


def run_roles(folder, n_ranks, *flags, kill_after=None, run=run_on_this_rank):
    return run_ranks(run, n_ranks, folder, list(flags), kill_after, init_process_group=False)


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_two_training_and_two_generating_ranks_take_the_steps_of_two_that_do_both(ahead, tmp_path):
    flags = [*STEPS, *FSDP, f"--rl.async_steps={ahead}", "--rl.weight_sync.mode=broadcast"]
    flags += ["--rl.generator.dtype=bfloat16"] if ahead else []
    both = run_roles(tmp_path / "both", 2, *flags)
    delta = ["--rl.weight_sync.delta"] if ahead else []
    apart = run_roles(tmp_path / "apart", 4, *flags, "--rl.generator.ranks=2", *delta)
    assert apart[2:] == [None, None]
    assert numbers(apart[0]) == numbers(apart[1]) == numbers(both[0])
    assert apart[0]["evaluations"] == both[0]["evaluations"] and both[0]["evaluations"]
    assert apart[0]["digest"] == both[0]["digest"]
    last = apart[0]["steps"][-1]
    assert last["rl/lag"] == ahead and last[f"rl/episodes_by_lag/{ahead}"] == 16


CRITIC = [*FSDP, "--rl.advantage.name=gae", "--rl.async_steps=1"]


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS["TP"], LAYOUTS["PP"], pytest.param(CRITIC, marks=pytest.mark.slow)],
    ids=["TP", "PP", "FSDP with a critic"],
)
def test_trainer_may_have_any_layout_and_there_may_be_one_generating_rank(layout, tmp_path):
    flags = ["--training.steps=3", *layout, "--rl.weight_sync.mode=broadcast"]
    both = run_roles(tmp_path / "both", 2, *flags)
    apart = run_roles(tmp_path / "apart", 3, *flags, "--rl.generator.ranks=1")
    assert numbers(apart[0]) == numbers(apart[1])
    # One rank draws more rows at once than each of two ranks, and sums in another order.
    for found, expected in zip(numbers(apart[0]), numbers(both[0]), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


SAVED = ["--training.steps=12", "--checkpoint.enable", "--checkpoint.interval=5"]
SAVED += ["--checkpoint.no_last_save_model_only", "--rl.async_steps=2", "--rl.generator.ranks=1"]


@pytest.mark.parametrize(
    ("extra", "steps_left"),
    [
        pytest.param([], list(range(6, 13)), marks=pytest.mark.slow),
        (["--rl.redraws=1", "--rl.minibatches=2"], [7, 9, 11]),
    ],
    ids=["one update", "redraws and two updates"],
)
def test_killed_run_with_generating_ranks_goes_on_bit_for_bit(extra, steps_left, tmp_path):
    flags = [*SAVED, *extra]
    assert steps_after_a_kill(tmp_path, run_on_this_rank, flags, kill_after=8) == steps_left


def steps_after_a_kill(folder, killed_run, flags, kill_after):
    """The steps of a continued run, which must have the bits of a run that was not killed."""
    unbroken = run_roles(folder / "unbroken", 2, *flags)[0]
    with pytest.raises(RankFailure, match="ended without a word"):
        run_roles(folder / "killed", 2, *flags, kill_after=kill_after, run=killed_run)
    resumed = run_roles(folder / "killed", 2, *flags)[0]
    steps = [step["step"] for step in resumed["steps"]]
    assert numbers(resumed) == numbers(unbroken)[-len(steps) :]
    assert resumed["digest"] == unbroken["digest"]
    return steps


def at_call(number, owner, method, action):
    """Run `action` before the call of this number of the owner's method."""
    inner, calls = getattr(owner, method), itertools.count(1)

    def method_with_action(*arguments, **options):
        if next(calls) == number:
            action()
        return inner(*arguments, **options)

    setattr(owner, method, method_with_action)


def die_after_draws(dump_folder, flags, n_draws):
    """`run_on_this_rank`, with the generating rank killed when it begins its draw number `n_draws`."""
    part = build_part(toy_config(dump_folder, *flags))
    if not isinstance(part, Controller):
        at_call(n_draws, part._draws, "begin_share", lambda: os.kill(os.getpid(), signal.SIGKILL))
        return part.train()
    with pytest.raises(LostGeneratorError):
        part.train()
    part.close()


@pytest.mark.parametrize(
    ("ahead", "n_draws"),
    [(2, 8), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 10), (0, 8)))],
)
def test_run_whose_generating_rank_was_killed_goes_on_bit_for_bit(ahead, n_draws, tmp_path):
    """Also if that was right after a checkpoint, which has the episodes that were drawn ahead."""
    flags = [*SAVED, f"--rl.async_steps={ahead}"]
    steps = steps_after_a_kill(tmp_path, die_after_draws, flags, n_draws)
    assert 0 < len(steps) <= 7, "it has not begun again"


@pytest.mark.parametrize("flags", [[], ["--rl.generator.in_flight", "--rl.async_steps=1"]], ids=str)
def test_rank_that_is_lost_while_it_gets_weights_hangs_no_rank(flags, tmp_path):
    """The other trainer rank still gathers weights with the first, which has no receiver."""
    first, second, left = run_ranks(leave_at_update, 3, tmp_path, flags, init_process_group=False)
    assert left == "left" and first == second and "\n" not in first
    assert "a rank that generates (rank 2 or a later rank) is gone or does not answer: " in first


def leave_at_update(dump_folder, flags):
    part = build_part(toy_config(dump_folder, *FSDP, "--rl.generator.ranks=1", *flags))
    if not isinstance(part, Controller):
        at_call(3, part.generator, "update_weights", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            part.train()
        return "left"
    with pytest.raises(LostGeneratorError) as caught:
        part.train()
    # Episodes that came before it left may be trained on.
    assert 2 <= part.step <= 2 + part.config.async_steps
    part.close()
    return str(caught.value)


class SlowLink:
    """A link that sends weights only while `is_open`, and records what it sent."""

    def __init__(self, failure=None):
        self.sent, self.n_received = [], 0
        self.is_open, self.failure = threading.Event(), failure

    def broadcast(self, message):
        self.sent.append(message)

    def send_weights(self, weights, changes):
        assert self.is_open.wait(60)
        if self.failure is not None:
            raise self.failure
        self.sent.append([tensor.tolist() for _, tensor in weights])

    def receive_from_all(self):
        self.n_received += 1
        return [[]]


def weights_of(version, tensor):
    return Weights(pairs=[("w", tensor)], version=version, digest=None)


def test_training_goes_on_while_weights_are_sent_in_the_order_of_the_messages():
    link, weight = SlowLink(), torch.zeros(2)
    remote = RemoteGenerator(link, 1)
    remote.update_weights(weights_of(0, weight))
    remote.begin("first")
    weight += 1  # the next training step
    assert remote.policy_version == 0
    threading.Timer(0.2, link.is_open.set).start()
    remote.update_weights(weights_of(1, weight))  # waits until the weights before are sent
    assert link.is_open.is_set()
    answer = remote.begin("second")
    weight += 1
    assert answer() == []
    remote.close()
    update = ("weights", True)
    first, second = ("draw", "first"), ("draw", "second")
    assert link.sent == [update, [[0.0, 0.0]], first, update, [[1.0, 1.0]], second, None]


def test_weights_and_draws_have_the_time_limit_of_a_collective_each(monkeypatch):
    """The other ranks that train wait in the collective, so a slow update must not count for a draw."""
    link, after_each = SlowLink(), []

    def collective(ask):
        result = ask()
        after_each.append((len(link.sent), link.n_received))
        return result

    monkeypatch.setattr(disaggregated, "from_rank_zero", collective)
    remote = RemoteGenerator(link, 1)
    remote.update_weights(weights_of(0, torch.zeros(2)))
    threading.Timer(0.1, link.is_open.set).start()
    assert remote.begin("request")() == []
    remote.close()
    assert after_each == [(3, 0), (3, 1)]  # messages sent, answers received


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (MemoryError("no room for the changes"), "no room for the changes"),
        (RuntimeError("Connection closed\nby peer"), "rank 1 or a later .*: Connection closed$"),
    ],
    ids=["of this rank", "of the connection"],
)
def test_failure_of_the_thread_that_sends_is_raised_at_the_next_wait_for_episodes(failure, message):
    link = SlowLink(failure)
    link.is_open.set()
    remote = RemoteGenerator(link, 1)
    for version in range(2):  # the second is not sent
        remote.update_weights(weights_of(version, torch.zeros(3)))
    with pytest.raises((MemoryError, LostGeneratorError), match=message):
        remote.begin("request")()
    remote.close()
    assert link.sent == [("weights", True)]


def two_links(limit):
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda member: Link(store, member, 2, limit), range(2)))


def test_weights_and_buffers_of_every_dtype_arrive():
    sender, receiver = two_links(timedelta(seconds=60))
    dtypes = torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.float8_e4m3fn
    tensors = [torch.arange(6).to(dtype) for dtype in dtypes]
    tensors += [torch.tensor(3.0), torch.zeros(2, 0), torch.rand(3, 2).t()]
    sent = [(str(i), tensor) for i, tensor in enumerate(tensors)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(sender.send_weights, StagedWeights(weights_of(0, None), sent), None)
        received = list(ReceivedWeights(receiver.down, WeightChanges()))
        done.result()
    for (name, tensor), (own_name, own) in zip(sent, received, strict=True):
        assert name == own_name and tensor.dtype == own.dtype and tensor.float().equal(own.float())


@pytest.mark.parametrize("build", [Controller, PolicyTrainer, LocalTrainingClient])
def test_what_has_no_part_in_the_division_of_ranks_refuses_it(build, tmp_path):
    with pytest.raises(ConfigError, match="generator.ranks = 1 .* start with torchtitan.rl.train"):
        build(toy_config(tmp_path, "--rl.generator.ranks=1"))
