"""One program runs on Tinker's client, over HTTP, and on the clients in this process."""

import asyncio
import copy
import json

import pytest
import torch

import torchtitan.rl.client as local
from tests.unit.rl.toy import toy_config

TOKENS = [1, 2, 3, 4, 5, 6]


def squares(data, logprobs):
    """A loss of the caller's own, with a metric."""
    return sum((values**2).sum() for values in logprobs), {"terms:sum": float(len(data))}


def program(types, service):
    """Trains, saves, samples and goes on from a saved state; returns numbers on the way."""
    client = service.create_lora_training_client("policy", rank=8, seed=1).result()
    assert client.get_info().is_lora is False and client.get_info().model_data.model_name
    targets = types.TensorData.from_torch(torch.tensor(TOKENS[1:]))
    prompt = types.ModelInput.empty().append(types.EncodedTextChunk(tokens=TOKENS[:2]))
    prompt = prompt.append_int(TOKENS[2])
    assert prompt.length == 3 and prompt.chunks[0].tokens
    inputs = types.ModelInput.from_ints(TOKENS[:-1])
    weights = {"weights": types.TensorData.from_numpy(torch.ones(5).numpy())}
    supervised = types.Datum(inputs, {"target_tokens": targets, **weights})
    found = []

    async def steps():
        for _ in range(2):
            output = await client.forward_backward_async([supervised], "cross_entropy")
            await (await client.optim_step_async(types.AdamParams(learning_rate=1e-2)))
            found.append((await output).metrics["loss:sum"])
        sampler = await client.save_weights_and_get_sampling_client_async()
        logprobs = await sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS))
        found.append(logprobs[1:])
        greedy = types.SamplingParams(max_tokens=3, temperature=0.0)
        drawn = await sampler.sample_async(prompt, 1, greedy)
        assert len(drawn.sequences[0].tokens) == 3
        found.append(drawn.sequences[0].logprobs)
        assert drawn.prompt_logprobs is None is drawn.topk_prompt_logprobs

    asyncio.run(steps())
    # The learning signal of a sample, by two losses.
    old = client.forward([supervised], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    gains = {"logprobs": old.to_torch() - 0.1, "advantages": torch.tensor([1, -1, 2, 0.5, -0.5])}
    gains = {name: types.TensorData.from_torch(values) for name, values in gains.items()}
    sampled = types.Datum(inputs, gains | {"target_tokens": targets})
    for loss_fn, config in (("dro", {"beta": 0.2}), ("ppo", None)):
        output = client.forward_backward([sampled], loss_fn, config).result()
        found.append(output.metrics["loss:sum"])
    output = client.forward_backward_custom([supervised], squares).result()
    found.append(output.metrics["terms:sum"])
    step = client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)).result()
    found.append(step.metrics["grad_norm"])

    state = client.save_state("state").result().path
    for_sampler = client.save_weights_for_sampler("state").result().path
    whole = types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=1, seed=0)
    saved = service.create_sampling_client(model_path=for_sampler).result()
    wanted = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4}
    response = saved.sample(whole, 2, params, **wanted, prompt_logprobs_last_n=4).result()
    assert len(response.sequences) == 2
    found += [response.prompt_logprobs, response.topk_prompt_logprobs]
    for name in ("", "_with_optimizer"):
        create = getattr(service, f"create_training_client_from_state{name}")
        client = create(state).result()
        output = client.forward_backward([supervised], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        after = client.forward([supervised], "cross_entropy").result()
        found += [output.metrics["loss:sum"], after.loss_fn_outputs[0]["logprobs"].tolist()]
    return json.loads(json.dumps(found))  # without tuples


def approx(value):
    if isinstance(value, list):
        return [approx(each) for each in value]
    return value if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    with local.LocalServiceClient(toy_config(tmp_path_factory.mktemp("local"))) as service:
        yield program(local, service)


def test_program_runs_in_this_process(in_process):
    first, second, *_, last = in_process
    assert second < first and len(last) == 5
    weights_only, with_optimizer = in_process[-4], in_process[-2]
    assert weights_only == with_optimizer and in_process[-3] != in_process[-1]


def test_program_returns_the_same_over_http(in_process, url, monkeypatch):
    tinker = pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    found = program(tinker, service)
    service.close("success").result()
    assert found == approx(in_process)


def test_top_tokens_are_those_of_a_log_softmax_in_fp64(tmp_path):
    with local.LocalServiceClient(toy_config(tmp_path)) as service:
        sampler = service.create_sampling_client(base_model="policy").result()
        prompts = [local.ModelInput.from_ints(TOKENS[:n]) for n in (6, 1, 3)]
        params = local.SamplingParams(max_tokens=1, temperature=0.0)
        futures = [sampler.sample(p, 1, params, True, topk_prompt_logprobs=5) for p in prompts]
        responses = [future.result() for future in futures]
        (model,) = service._training._trainer.engine.model_parts
        reference = copy.deepcopy(model).double()
    for prompt, response in zip(prompts, responses, strict=True):
        top, logprobs = response.topk_prompt_logprobs, response.prompt_logprobs
        assert top[0] is None is logprobs[0] and len(top) == prompt.length
        with torch.no_grad():
            exact = reference(torch.tensor([prompt.tokens]))[0].log_softmax(-1)
        for place, row in enumerate(top[1:]):
            values, ids = exact[place].topk(5)
            assert [token for token, _ in row] == ids.tolist()
            assert [value for _, value in row] == pytest.approx(values.tolist(), abs=1e-5)
            own = dict(row).get(TOKENS[place + 1])
            assert own is None or own == logprobs[place + 1], "bit for bit"


def test_adapter_of_the_output_trains_if_the_client_wants_it(tmp_path):
    targets = "--lora.target_modules=all-linear,lm_head"
    config = toy_config(tmp_path, "--model.converters=lora", targets)
    with local.LocalServiceClient(config) as service:
        assert service._training.shares_passes
        whole = local.ModelInput.from_ints(TOKENS)
        datum = local.Datum(local.ModelInput(whole.tokens[:-1]), {"target_tokens": TOKENS[1:]})
        for wanted in (False, True):
            parts = {"train_attn": not wanted, "train_mlp": False, "train_unembed": wanted}
            client = service.create_lora_training_client("policy", 4, 0, **parts).result()
            first, second = (
                [client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]]
                + [client.optim_step(local.AdamParams(learning_rate=0.05)).result()]
                for _ in range(2)
            )
            assert second[0] < first[0]
            output = client._trainer.engine.model_parts[0].output
            assert bool(output.lora_b.count_nonzero()) is wanted
        sampler = client.save_weights_and_get_sampling_client().result()
        params = local.SamplingParams(max_tokens=4, seed=0)
        (drawn,) = sampler.sample(whole, 1, params).result().sequences
        scored = sampler.compute_logprobs(local.ModelInput((*whole.tokens, *drawn.tokens))).result()
        assert drawn.logprobs == pytest.approx(scored[-4:], abs=1e-5), "cached decoding has it, too"


def test_adapters_that_cannot_be_are_refused(tmp_path):
    config = toy_config(tmp_path, "--model.converters=lora", "--lora.rank=8")
    no_parts = {"train_attn": False, "train_mlp": False}
    with local.LocalServiceClient(config) as service:
        for rank, parts, message in (
            (0, {}, "rank must be at least 1, got 0"),
            (16, {}, "rank must be 1 to 8"),
            (4, no_parts, "must train a part that has adapters"),
        ):
            with pytest.raises(ValueError, match=message):
                service.create_lora_training_client("policy", rank, **parts)
