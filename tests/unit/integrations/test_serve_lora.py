"""A server of adapters gives each client the rank that it asks for."""

import pytest
import torch

from tests.unit.integrations.test_serve import DATA, PROMPT, server_config
from tests.unit.integrations.tinker_server import Http, serving
from tests.unit.rl.toy import toy_config
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.types import AdamParams, Datum, ModelInput

LORA = ["--model.converters=lora", "--lora.rank=8", "--lora.alpha=16"]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(server_config(tmp_path_factory.mktemp("served"), *LORA)) as url:
        yield url


class Client(Http):
    number = 0

    def create(self, **config):
        self.number += 1
        return self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=self.number,
            base_model="any",
            lora_config=config,
        )

    def start_model(self, **config):
        status, answer = self.create(**config)
        assert status == 200, answer
        self.model = self.result(answer)["model_id"]


@pytest.fixture
def run(url):
    client = Client(url).start()
    yield client
    client.ask(f"sessions/{client.session}/finish", reason={"type": "success"})


def test_rank_of_a_client_is_that_of_an_engine_of_this_rank(run, tmp_path):
    run.start_model(rank=4, seed=5)
    info = run.ask("get_info", model_id=run.model)
    assert info["is_lora"] is True and info["lora_rank"] == 4
    data = [Datum(ModelInput.from_ints(tokens), inputs) for tokens, inputs in DATA]
    # The same scale, alpha / rank, for half the rank.
    smaller = [*LORA[:1], "--lora.rank=4", "--lora.alpha=8"]
    with LocalTrainingClient(toy_config(tmp_path, *smaller)) as client:
        client.start_adapters(5, 4, ["self_attn", "mlp"]).result()
        losses = []
        for _ in range(4):
            ours = client.forward_backward(data, "cross_entropy").result()
            step = client.optim_step(AdamParams(learning_rate=1e-2)).result()
            losses.append(run.forward_backward(DATA)["metrics"]["loss:sum"])
            assert losses[-1] == pytest.approx(ours.metrics["loss:sum"], rel=1e-6)
            metrics = run.optim_step()["metrics"]
            assert metrics["grad_norm"] == pytest.approx(step.metrics["grad_norm"], rel=1e-6)
    assert losses[-1] < losses[0]


def test_each_model_begins_with_new_adapters_and_samplers_keep_theirs(run):
    run.start_model(rank=8, seed=1)
    first = run.forward_backward(DATA)["metrics"]["loss:sum"]
    run.optim_step(lr=0.1)
    sampler = run.sampler()
    sampled = run.sample(sampler, PROMPT, 1)["sequences"][0]
    run.start_model(rank=2, seed=1)
    assert run.forward_backward(DATA)["metrics"]["loss:sum"] == pytest.approx(first, rel=1e-6)
    again = run.sample(sampler, PROMPT, 2)["sequences"][0]
    assert (again["tokens"], again["logprobs"]) == (sampled["tokens"], sampled["logprobs"])


def test_model_from_a_saved_state_keeps_its_rank_and_goes_on_as_it_would_have(run):
    def two_steps():
        calls = [(run.forward_backward(DATA), run.optim_step()) for _ in range(2)]
        return [(x["metrics"]["loss:sum"], y["metrics"]["grad_norm"]) for x, y in calls]

    run.start_model(rank=4, seed=5)
    two_steps()
    path = run.train("save_weights", path="state")["path"]
    assert run.ask("weights_info", tinker_path=path)["lora_rank"] == 4
    expected = two_steps()
    for optimizer in (True, False):
        run.number += 1
        loaded = {"model_seq_id": run.number, "path": path, "optimizer": optimizer}
        run.model = run.wait("load_weights", session_id=run.session, **loaded)["model_id"]
        assert run.ask("get_info", model_id=run.model)["lora_rank"] == 4
        found = two_steps()
        assert found[0] == expected[0] and (found == expected) is optimizer


def test_parts_that_a_client_leaves_out_do_not_train(tmp_path):
    with LocalTrainingClient(toy_config(tmp_path, *LORA)) as client:
        client.start_adapters(0, 3, ["self_attn"]).result()
        data = [Datum(ModelInput.from_ints(tokens), inputs) for tokens, inputs in DATA]
        for _ in range(2):
            client.forward_backward(data, "cross_entropy").result()
            client.optim_step(AdamParams(learning_rate=1e-2)).result()
        (part,) = client._trainer.engine.model_parts
        for name, parameter in part.named_parameters():
            if name.endswith(("lora_a", "lora_b")):
                rows = parameter if name.endswith("lora_a") else parameter.t()
                assert not torch.any(rows[3:]), name
                assert torch.any(rows[:3]) == ("attention" in name), name


def test_ranks_and_parts_that_cannot_be_are_refused_in_one_sentence(run):
    status, answer = run.create(rank=16)
    assert status == 400
    assert "rank must be 1 to 8, this server's lora.rank, got 16; ask for less" in answer["detail"]
    status, answer = run.create(rank=4, train_attn=False, train_mlp=False)
    assert status == 400 and "must train a part that has adapters" in answer["detail"]


def test_clients_that_take_turns_train_as_if_each_were_alone(url, tmp_path):
    """Gradients are added twice before a step, between those of the others; then one client leaves."""
    calls_of = {0: [2, 2, 1, 1], 1: [2, 2], 2: [2, 2, 1, 1]}  # client -> calls before each step
    data = {
        n: [([n + 7, n + 8], {"target_tokens": [n + 8, 3], "weights": [1.0, 1.0]})]
        for n in calls_of
    }
    runs = {n: Client(url).start() for n in calls_of}
    losses = {n: [] for n in calls_of}
    for n, run in runs.items():
        run.start_model(rank=2 * n + 1, seed=n)
    for step in range(4):
        here = [n for n in calls_of if step < len(calls_of[n])]
        for call in range(2):
            for n in here:
                if call < calls_of[n][step]:
                    losses[n].append(runs[n].forward_backward(data[n])["metrics"]["loss:sum"])
        for n in reversed(here):
            runs[n].optim_step()
            if step == len(calls_of[n]) - 1:
                runs[n].ask(f"sessions/{runs[n].session}/finish", reason={"type": "success"})
    for n, calls in calls_of.items():
        own = [Datum(ModelInput.from_ints(tokens), inputs) for tokens, inputs in data[n]]
        with LocalTrainingClient(toy_config(tmp_path / str(n), *LORA)) as client:
            client.start_adapters(n, 2 * n + 1, ["self_attn", "mlp"]).result()
            alone = []
            for n_calls in calls:
                outputs = [client.forward_backward(own, "cross_entropy") for _ in range(n_calls)]
                alone += [output.result().metrics["loss:sum"] for output in outputs]
                client.optim_step(AdamParams(learning_rate=1e-2)).result()
        assert losses[n] == alone, "bit for bit"
