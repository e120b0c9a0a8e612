"""The published tinker client talks to the server unchanged; skipped where it is not installed."""

import pytest
import torch

tinker = pytest.importorskip("tinker")


@pytest.fixture
def service(url, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    yield service
    service.close("success").result()


def datum(tokens, **inputs):
    inputs = {name: tinker.TensorData.from_torch(value) for name, value in inputs.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def test_many_samples_come_back(service):
    client = service.create_lora_training_client(base_model="any", rank=8).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=4)
    futures = [sampler.sample(prompt, 2, params) for _ in range(100)]
    sequences = [sequence for future in futures for sequence in future.result().sequences]
    assert len(sequences) == 200 and len({s.sequence_id for s in sequences}) == 200
    assert {len(s.tokens) for s in sequences} == {4} == {len(s.logprobs) for s in sequences}


def test_mistakes_come_as_the_clients_own_errors(service):
    client = service.create_lora_training_client(base_model="any", rank=8).result()
    wrong = [datum([1], target_tokens=torch.tensor([2]), wieghts=torch.ones(1))]
    with pytest.raises(tinker.RequestFailedError, match="got 'wieghts'"):
        client.forward_backward(wrong, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="of this step failed"):
        client.optim_step(tinker.AdamParams()).result()
    with pytest.raises(tinker.BadRequestError, match="learning_rate must be a finite number"):
        client.optim_step(tinker.AdamParams(learning_rate=float("nan"))).result()
    nan = datum([1], target_tokens=torch.tensor([2]), weights=torch.tensor([torch.nan]))
    with pytest.raises(tinker.RequestFailedError, match="weights of a Datum must be finite"):
        client.forward_backward([nan], "cross_entropy").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=100)
    with pytest.raises(tinker.BadRequestError, match="max_tokens must be 1 to 24, got 100"):
        sampler.sample(tinker.ModelInput.from_ints([1]), 1, params).result()
    with pytest.raises(tinker.NotFoundError, match="not among this server's saved states"):
        service.create_training_client_from_state("tinker://a/weights/b").result()
