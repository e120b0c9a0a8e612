import gc
import math
import threading

import pytest
import torch

from tests.unit.rl.toy import gradients, toy_config
from torchtitan.experiments.rl_toy.tasks import CharTokenizer
from torchtitan.rl.client import AdamParams, Datum, LocalTrainingClient, ModelInput, SamplingParams

pytestmark = pytest.mark.long

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with LocalTrainingClient(toy_config(tmp_path_factory.mktemp("run"))) as client:
        yield client


@pytest.fixture(autouse=True)
def no_gradients(client):
    yield
    client._trainer.zero_grad()
    client._failure = None


def datum(tokens, **inputs):
    given = {name: torch.tensor(values) for name, values in inputs.items()}
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": torch.tensor(tokens[1:]), **given}
    )


DATA = [
    datum([1, 2, 3, 4], weights=[0.0, 1.0, 2.0]),
    datum([5, 6], weights=[1.0]),
    datum([7, 8, 9], weights=[0.5, 0.0]),
]
PROBE = ModelInput.from_ints([1, 2, 3, 4])
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def logprobs_of(client, data=DATA):
    """Of the targets of the first Datum."""
    return client.forward(data).result().loss_fn_outputs[0]["logprobs"]


def learn(client, lr=1e-2):
    client.forward_backward(DATA, "cross_entropy")
    return client.optim_step(AdamParams(learning_rate=lr)).result()


def new_sampler(client, **options):
    return client.save_weights_and_get_sampling_client(**options).result()


def score(sampler):
    return sampler.compute_logprobs(PROBE).result()


def test_cross_entropy_is_the_weighted_sum_over_tokens(client):
    found = client.forward_backward(DATA, "cross_entropy").result()
    expected = -sum(
        (output["logprobs"] * datum.loss_fn_inputs["weights"]).sum().item()
        for output, datum in zip(found.loss_fn_outputs, DATA, strict=True)
    )
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    forward = client.forward(DATA).result()
    for ours, again in zip(found.loss_fn_outputs, forward.loss_fn_outputs, strict=True):
        assert torch.equal(ours["logprobs"], again["logprobs"])
        assert ours["logprobs"].all(), "of every target, also where its weight is 0"


def test_custom_loss_has_the_gradients_of_the_builtin_one(client):
    client.forward_backward(DATA, "cross_entropy").result()
    expected = gradients(client._trainer)
    client._trainer.engine.optimizers.zero_grad()

    def weighted(data, logprobs):
        weights = [item.loss_fn_inputs["weights"] for item in data]
        return -(torch.cat(logprobs) * torch.cat(weights)).sum(), {"terms": len(data)}

    found = client.forward_backward_custom(DATA, weighted).result()
    torch.testing.assert_close(gradients(client._trainer), expected, **CLOSE)
    assert found.metrics["terms"] == 3


def test_ppo_clips_where_its_thresholds_say(client):
    tokens = [1, 2, 3]
    logprobs = logprobs_of(client, [datum(tokens)])

    def loss(ratio, advantage, **config):
        behaviour = (logprobs - torch.tensor(ratio).log()).tolist()
        data = [datum(tokens, logprobs=behaviour, advantages=[advantage] * 2)]
        return client.forward_backward(data, "ppo", config).result().metrics["loss:sum"]

    assert loss(1.5, 1.0) == pytest.approx(-2 * 1.2, rel=1e-4)
    assert loss(1.5, 1.0, clip_high_threshold=2.0) == pytest.approx(-2 * 1.5, rel=1e-4)
    assert loss(0.5, -1.0) == pytest.approx(2 * 0.8, rel=1e-4)


def test_importance_sampling_does_not_bound_ratios(client):
    tokens = [1, 2, 3]
    behaviour = logprobs_of(client, [datum(tokens)]) - torch.tensor([12.0, -12.0])
    data = [datum(tokens, logprobs=behaviour.tolist(), advantages=[1e-4, 2.0])]
    found = client.forward_backward(data, "importance_sampling").result()
    # tinker-docs.thinkingmachines.ai/losses: -(exp(target - sampling) * advantages).sum()
    expected = -(math.exp(12.0) * 1e-4 + math.exp(-12.0) * 2.0)
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    # The gradient is that of the log-probs times their ratios.
    ours = gradients(client._trainer)
    client._trainer.engine.optimizers.zero_grad()
    weights = [math.exp(12.0) * 1e-4, math.exp(-12.0) * 2.0]
    client.forward_backward([datum(tokens, weights=weights)], "cross_entropy").result()
    torch.testing.assert_close(ours, gradients(client._trainer), rtol=1e-4, atol=1e-6)


def test_step_whose_gradient_norm_is_not_finite_changes_nothing_and_says_so(client):
    before = logprobs_of(client)
    client.forward_backward([datum([1, 2], weights=[1e37])], "cross_entropy").result()
    with pytest.raises(FloatingPointError, match="the gradient norm is inf: the weights and"):
        client.optim_step(AdamParams()).result()
    assert torch.equal(logprobs_of(client), before)


def test_calls_are_carried_out_in_order_and_errors_come_out_of_futures(client):
    futures = [
        client.forward_backward(DATA, "cross_entropy"),
        client.optim_step(AdamParams(learning_rate=1e-3)),
        client.save_weights_and_get_sampling_client(),
    ]
    *_, sampler = [future.result() for future in futures]
    assert futures[1].result().metrics["lr"] == 1e-3

    response = sampler.sample(PROBE, 5, SamplingParams(max_tokens=4, seed=1)).result()
    assert len(response.sequences) == 5
    sequence = response.sequences[0]
    scored = sampler.compute_logprobs(ModelInput((*PROBE.tokens, *sequence.tokens))).result()
    assert scored[0] is None
    assert scored[4:] == pytest.approx(sequence.logprobs, abs=5e-6)
    with pytest.raises(ValueError, match="found no gradients"):
        client.optim_step(AdamParams()).result()


def test_loaded_state_is_the_saved_one(client):
    saved = client.save_state("before").result()
    before = logprobs_of(client)
    learn(client)
    after = logprobs_of(client)
    assert not torch.equal(after, before)
    client.load_state_with_optimizer(saved.path).result()
    assert torch.equal(logprobs_of(client), before)
    learn(client)
    assert torch.equal(logprobs_of(client), after), "the optimizer's moments are back, too"

    client.forward_backward(DATA, "cross_entropy")
    client.load_state(saved.path).result()
    assert not any(optimizer.state for optimizer in client._trainer.engine.optimizers)
    with pytest.raises(ValueError, match="found no gradients"):
        client.optim_step(AdamParams()).result()


def data(**inputs):
    return [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], **inputs})]


@pytest.mark.parametrize(
    ("loss_fn", "data", "message"),
    [
        ("cross_entropy", data(target_tokens=[2.5, 3]), r"token ids, got \[2.5, 3.0\]; give"),
        ("cross_entropy", data(weights=["a", "b"]), "must be a list or a tensor of numbers"),
        ("cross_entropy", data(weights=[1.0]), r"one number per input token, \[2\], got \[1\]"),
        ("cross_entropy", [Datum(ModelInput((1,)), {})], "needs target_tokens"),
        ("cross_entropy", [datum([1, 2], weight=[1.0])], "got 'weight'"),
        ("cross_entropy", [datum(list(range(30)))], "a row of 24 tokens, got 29"),
        ("ppo", data(logprobs=[-1.0, -1.0]), "needs advantages in loss_fn_inputs"),
    ],
)
def test_data_that_cannot_be_used_fail_the_step(client, loss_fn, data, message):
    client.forward_backward(DATA, "cross_entropy")
    future = client.forward_backward(data, loss_fn)
    client.forward_backward(DATA, "cross_entropy")
    sampler = new_sampler(client)
    with pytest.raises(RuntimeError, match=f"this step failed .*{message}") as raised:
        client.optim_step(AdamParams()).result()
    assert str(raised.value.__cause__) == str(future.exception())
    score(sampler)  # the same weights
    with pytest.raises(ValueError, match="found no gradients"):
        client.optim_step(AdamParams()).result()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.forward_backward(DATA, "dpo"), "loss_fn must be one of cross_entropy"),
        (lambda c: c.forward_backward(DATA, "ppo", {"clip": 1.0}), "loss_fn_config of ppo takes"),
        (
            lambda c: c.forward_backward(DATA, "ppo", {"clip_low_threshold": math.nan}),
            "clip_low_threshold of loss_fn_config must be a number, got nan",
        ),
        (lambda c: c.optim_step(AdamParams(beta2=1.5)).result(), "betas must be .*1.5"),
        (
            lambda c: c.forward_backward_custom(
                DATA, lambda _, x: ((x[0] - x[0]).abs().sqrt().sum(), {})
            ).result(),
            "must have a finite loss and finite gradients",
        ),
        (
            lambda c: c.forward_backward_custom(DATA, lambda _, x: (x[0], {})).result(),
            "loss_fn must return a sum over tokens, a scalar tensor",
        ),
        (lambda c: c.save_state("../x").result(), "got '../x', which is outside of it"),
        (lambda c: c.save_state("a/..").result(), "got 'a/..', which is outside of it"),
    ],
)
def test_mistakes_are_named(client, call, message):
    with pytest.raises(ValueError, match=message):
        call(client)


def test_mask_and_weights_count_together(client):
    def loss(**inputs):
        data = [datum([1, 2, 3], **inputs)]
        return client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]

    assert loss(weights=[2.0, 5.0], mask=[1.0, 0.0]) == pytest.approx(loss(weights=[2.0, 0.0]))


def test_concurrent_samples_are_drawn_at_once_and_each_gets_its_own(client, monkeypatch):
    sampler = new_sampler(client)
    generator, asked = client._generator, []
    generate = generator.generate
    monkeypatch.setattr(
        generator, "generate", lambda p, *args: (asked.append(p), generate(p, *args))[1]
    )
    prompts = [[i, i + 1] for i in range(6)]

    started = threading.Event()
    busy = client._thread.submit(started.wait)
    futures = [sampler.sample(ModelInput.from_ints(p), 2, GREEDY) for p in prompts]
    other = sampler.sample(ModelInput.from_ints([1]), 1, GREEDY)
    started.set()
    together = [[list(s.tokens) for s in future.result().sequences] for future in futures]
    assert len(other.result().sequences) == 1 and busy.result()
    assert asked == [prompts, [[1]]]
    alone = [sampler.sample(ModelInput.from_ints(p), 2, GREEDY).result() for p in prompts]
    assert together == [[list(s.tokens) for s in response.sequences] for response in alone]


def test_completion_ends_with_the_token_that_completes_a_stop_string(client):
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz01234")
    client.tokenizer = tokenizer  # the toy model has none of its own
    sampler = new_sampler(client)
    prompt, drawn = ModelInput.from_ints([1, 2]), {"max_tokens": 12, "temperature": 0.0}
    whole = sampler.sample(prompt, 1, SamplingParams(**drawn)).result().sequences[0]
    text = tokenizer.decode(whole.tokens)
    for stop in (text[3:6], [text[3:6]], ["never", text[3:6]]):
        stopped = sampler.sample(prompt, 2, SamplingParams(stop=stop, **drawn)).result()
        end = text.index(text[3:6]) + 3
        for sequence in stopped.sequences:
            assert tokenizer.decode(sequence.tokens) == text[:end]
            assert sequence.stop_reason == "stop"
            assert sequence.logprobs == whole.logprobs[: len(sequence.tokens)]
    never = sampler.sample(prompt, 1, SamplingParams(stop="never", **drawn)).result()
    assert never.sequences == [whole] and whole.stop_reason == "length"


# ---- samplers keep their weights ----


@pytest.mark.parametrize("mode", ["reference", "broadcast"])
def test_sampler_keeps_its_weights_and_training_goes_on_as_without_it(tmp_path, mode):
    def run(with_samplers):
        config = toy_config(tmp_path / str(with_samplers), f"--rl.weight_sync.mode={mode}")
        with LocalTrainingClient(config) as client:
            seen = []
            for _ in range(3):
                if with_samplers:
                    sampler = new_sampler(client)
                    drawn = sampler.sample(PROBE, 2, GREEDY).result()
                    seen.append((sampler, drawn, score(sampler)))
                learn(client)
            for sampler, drawn, scored in reversed(seen):
                assert sampler.sample(PROBE, 2, GREEDY).result() == drawn
                assert score(sampler) == scored
            assert len({tuple(scored) for *_, scored in seen}) == len(seen)
            learn(client)
            return client.forward(DATA).result().loss_fn_outputs

    for ours, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(ours["logprobs"], plain["logprobs"])


def test_copies_are_bounded_and_pinned_ones_stay(tmp_path):
    with LocalTrainingClient(toy_config(tmp_path, "--rl.generator.max_snapshots=2")) as client:
        first = new_sampler(client, pinned=True)
        scored = score(first)
        samplers = [new_sampler(client) for _ in range(4) if learn(client)]
        assert len(client._snapshots._copies) == 1 + 2
        with pytest.raises(ValueError, match="more than 2 later .* raise rl.generator.max_snap"):
            score(samplers[0])
        score(samplers[1])
        assert score(first) == scored
        client.load_sampler_weights(first).result()
        assert client.forward(DATA).result()  # the policy has its first weights again
        assert score(new_sampler(client)) == scored
        assert not any(optimizer.state for optimizer in client._trainer.engine.optimizers)


def test_weights_that_nobody_samples_from_are_not_copied(client):
    gc.collect()  # sampling clients of earlier tests, which exceptions refer to
    new_sampler(client)  # and dropped
    client.forward(DATA).result()
    learn(client)
    assert not client._snapshots._copies


def test_sampler_of_a_saved_state_leaves_the_policy_alone(client):
    scored = score(new_sampler(client))
    path = client.save_state("for_sampler").result().path
    learn(client)
    before = logprobs_of(client)
    saved = client.create_sampling_client(path).result()
    assert score(saved) == scored
    for _ in range(6):  # the copy is dropped, so the state is loaded again
        new_sampler(client)
        learn(client, lr=0.0)
    assert score(saved) == scored
    assert torch.equal(logprobs_of(client), before)
