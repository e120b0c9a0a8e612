"""Clients of adapters share passes over the base, each as if it was alone; none keeps others waiting."""

import re
import threading
from dataclasses import replace

import pytest
import torch

from tests.unit.integrations.tinker_server import PROMPT, Http, at_once, local_step
from tests.unit.rl.together import (
    EXPERTS,
    LAYERS,
    LORA,
    adapters_of,
    largest_difference,
    metrics_of,
    params_of,
    request,
    train,
)
from tests.unit.rl.toy import toy_config
from torchtitan.adapters.multi_lora import reasons_for_turns
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.policy import Policy
from torchtitan.integrations.tinker.request_queue import Command, RequestQueue
from torchtitan.integrations.tinker.types import Datum, ModelInput
from torchtitan.numerics import products

N_MODELS, N_STEPS = 6, 2


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return train(str(tmp_path_factory.mktemp("together")), N_MODELS, N_STEPS)


def test_models_in_one_pass_have_the_losses_of_each_alone(together, tmp_path):
    """Each has another loss, rank, learning rate and number of sequences. A model alone is in the policy
    all the time."""
    with LocalTrainingClient(toy_config(tmp_path, *LORA)) as client:
        for model in range(N_MODELS):
            client.start_adapters(**adapters_of(model)).result()
            for step in range(N_STEPS):
                own = request(model, step)
                output = client.forward_backward(own.data, own.loss_fn).result()
                update = client.optim_step(params_of(model)).result().metrics
                expected = (metrics_of([output])[0], update["grad_norm"])
                assert largest_difference(together[step][model], expected) <= 1e-6, (model, step)
    first, last = together[0][0][0], together[-1][0][0]
    assert first[0]["loss:sum"] != last[0]["loss:sum"]


def of_one_length(model, step):
    tokens = torch.arange(model, model + 17)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    return request(model, step, data=[datum], loss_fn="cross_entropy")


@pytest.mark.parametrize("family", ["", EXPERTS])
def test_products_of_a_model_do_not_depend_on_the_rows_of_others(family, monkeypatch, tmp_path):
    """In rows of one length all bits are those of the model alone, also where the size of a product would
    choose another library for it, as that of many models' rows does in a model of 3M parameters."""
    x, weight = torch.randn(64, 128), torch.randn(128, 128)
    if not torch.equal((x @ weight)[:16], x[:16] @ weight):
        pytest.skip("this CPU's library rounds a row differently beside other rows")
    # Rows of 24 slots; weights of 128 by 128 and 352: those of one model are below, those of four above.
    monkeypatch.setattr(products, "_LEAST_MULTIPLICATIONS", 1_200_000)
    results = [
        train(str(tmp_path / str(x)), 4, 3, is_together=x, family=family, request_of=of_one_length)
        for x in (True, False)
    ]
    if family:  # products of fewer than four tokens, as some experts have, round differently
        assert largest_difference(*results) <= 1e-6
    else:
        assert results[0] == results[1]


def test_states_in_files_and_rows_of_several_samples_change_no_number(together, tmp_path):
    files = ("--rl.serve.max_host_mib=1",)  # one model's state has 0.6 MiB
    found = train(str(tmp_path / "files"), N_MODELS, N_STEPS, serve=files)
    assert largest_difference(found, together) == 0
    assert not list(tmp_path.glob("files/waiting_models/**/*.safetensors")), "they are removed"
    packed = ("--model.attn_type=flex", "--model.attn_mask_type=position_block_causal")
    found = train(str(tmp_path / "packed"), N_MODELS, 1, (*packed, "--rl.batch.packing"))
    assert largest_difference(found, together[:1]) <= 1e-6


@pytest.fixture
def policy(tmp_path):
    """A policy with the models "0", "1" and "2"."""
    config = toy_config(tmp_path, *LORA)
    with LocalTrainingClient(config) as client:
        policy = Policy(client, config)
        for model in range(3):
            policy.start_model(adapters_of(model), str(model))
        yield policy
        policy.close()


def test_wrong_request_and_dropped_model_leave_the_other_models_as_they_are(policy):
    wrong = request(1, 0, data=[Datum(ModelInput((1, 99)), {"target_tokens": [1, 2]})])
    wrong = replace(wrong, loss_fn="cross_entropy")
    policy.drop_models(["2"])
    items = [("0", request(0, 0)), ("1", wrong), ("2", request(2, 0)), ("0", request(0, 1))]
    first, error, dropped, second = policy.forward_backward(items)
    assert "must be ids in [0, 32), got 1 to 99" in str(error)
    gone = policy.forward_backward([("2", request(2, step)) for step in range(2)])
    assert all("model 2 was dropped" in str(error) for error in (dropped, *gone))
    updated, failed = policy.optim_step([("0", params_of(0)), ("1", params_of(1))])
    assert "a forward_backward of this step failed" in str(failed) and "99" in str(failed)
    policy.start_model(adapters_of(0), "alone")
    alone = [policy.forward_backward([("alone", request(0, step))])[0] for step in range(2)]
    assert largest_difference(metrics_of([first, second]), metrics_of(alone)) <= 1e-6
    (expected,) = policy.optim_step([("alone", params_of(0))])
    assert updated["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)


def test_model_with_weights_that_are_not_finite_has_its_error_alone(policy):
    items = [(str(model), request(model, 0)) for model in range(3)]
    expected = metrics_of(policy.forward_backward(items))
    policy._use("")
    for weight in policy._waiting.get(["1"])[0].weights.values():
        weight.fill_(torch.nan)
    first, error, last = policy.forward_backward(items)
    assert isinstance(error, FloatingPointError) and "not finite in Datum 0" in str(error)
    assert metrics_of([first, last]) == [expected[0], expected[2]]


def test_forward_of_several_models_is_that_of_each(policy):
    items = [(str(model), request(model, 0, forward_only=True)) for model in range(3)]
    found = metrics_of(policy.forward_backward(items))
    alone = [metrics_of(policy.forward_backward([item]))[0] for item in items]
    assert largest_difference(found, alone) <= 1e-6
    assert all(
        model.gradients[name] is None
        for model in policy._waiting.get(["0", "1"])
        for name in model.gradients
    )


def test_settings_under_which_models_take_turns_are_named(tmp_path):
    config = toy_config(tmp_path, *LORA, "--lora.also_train=norms")
    with LocalTrainingClient(config) as client:
        engine = client._trainer.engine
        (found,) = reasons_for_turns(config, engine.parallel_dims, engine.model_parts)
        assert not client.shares_passes
        assert "which lora.also_train trains whole" in found


# ---- turns ----


def command(lane, size=1, joins="fb", **options):
    options |= {"lane": lane, "size": size, "joins": joins, "items": [lane]}
    return Command("forward_backward", {}, **options)


def lanes_of(*commands, max_size=4):
    lanes = RequestQueue(max_size)
    for each in commands:
        lanes.add(each)
    return lanes


def batches(lanes):
    while lanes.has_commands:
        yield [each.lane for each in lanes.next_batch()]


def test_client_that_floods_does_not_keep_the_others_waiting():
    flood = [command("flood", size=3) for _ in range(50)]
    lanes = lanes_of(*flood, command("small"), command("other", size=3))
    assert list(lanes.next_batch()) and lanes.has_commands
    found = [[each.lane for each in lanes.next_batch()] for _ in range(3)]
    assert found[0] == ["other"] or found[0] == ["other", "small"]
    lanes = lanes_of(*[command("flood", size=100) for _ in range(50)], command("small"))
    assert next(batches(lanes)) == ["flood"], "larger than the limit: it has a pass of its own"
    assert next(batches(lanes)) == ["small"]


STEP, ALONE = command("a", joins="optim_step"), command("b", joins=None)
BURST = [command(x, joins=x, size=0, comes_in_bursts=True) for x in ("logprobs", "sample")]


@pytest.mark.parametrize(
    "commands, expected",
    [
        ([*map(command, "aaaaabc")], [["a", "b", "c", "a"], ["a", "a", "a"]]),
        ([command("a"), STEP, *map(command, "ab"), ALONE], [["a", "b"], ["a"], ["b"], ["a"]]),
        ([command("s", joins=None), *BURST * 10], [["s"], ["logprobs"] * 10, ["sample"] * 10]),
    ],
    ids=[
        "lanes take turns",
        "in order within a lane, and alone without a key",
        "bursts are joined",
    ],
)
def test_commands_are_joined_into_batches(commands, expected):
    assert list(batches(lanes_of(*commands))) == expected


# ---- over HTTP ----


FLAGS = (*LORA, "--rl.serve.max_models=4", "--training.local_batch_size=16")


def begin(url, **config):
    client = Http(url).begin()
    client.start_model(**config)
    return client


def test_clients_that_train_at_once_share_passes(url, monkeypatch, tmp_path):
    n_calls = []
    run = Policy.forward_backward

    def counted(self, items):
        n_calls.append(len(items))
        return run(self, items)

    monkeypatch.setattr(Policy, "forward_backward", counted)
    barrier = threading.Barrier(4)

    def use(number):
        client = begin(url, rank=number + 1, seed=number)
        barrier.wait()
        losses = [client.step()[0] for _ in range(5)]
        client.finish()
        return losses

    found = at_once(use, range(4))
    assert sum(n_calls) == 20 and len(n_calls) < 15, "most requests did not wait for a turn"
    with LocalTrainingClient(toy_config(tmp_path, *LORA)) as client:
        for number, losses in enumerate(found):
            client.start_adapters(number, number + 1, LAYERS).result()
            expected = [local_step(client)[0] for _ in losses]
            assert losses == pytest.approx(expected, rel=1e-6)


def test_model_beyond_the_limit_is_refused_with_the_setting(url):
    clients = [begin(url, rank=8) for _ in range(4)]
    late = Http(url).begin()
    status, answer = late.post("create_model", **late.new_model(lora_config={"rank": 1}))
    limit = "MiB train on this server, the limit set by rl.serve.max_models, or by max_device"
    assert status == 429 and re.search(rf"4 models of 0\.\d+ {limit}", answer["detail"])
    for client in clients:
        client.finish()
    late.start_model(rank=1)
    sampled = late.sample(late.sampler(), PROMPT, 1)
    assert len(sampled["sequences"][0]["tokens"]) == 4
