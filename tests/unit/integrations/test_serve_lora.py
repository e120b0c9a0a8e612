"""A server of adapters: each client has the rank that it asks for, and changes no other client's model."""

import json

import pytest
import torch

from tests.unit.integrations.tinker_server import (
    DATA,
    LORA,
    PROMPT,
    Http,
    forward_backward_message,
    local_step,
)
from tests.unit.rl.neighbours import changes, files_of_at_most, train_on_full_disk
from tests.unit.rl.together import largest_difference, train
from tests.unit.rl.toy import toy_config
from torchtitan.integrations.tinker.client import LocalTrainingClient

FLAGS = LORA


def test_rank_of_a_client_is_that_of_an_engine_of_this_rank(run, tmp_path):
    run.start_model(rank=4, seed=5)
    info = run.ask("get_info", model_id=run.model)
    assert info["is_lora"] is True and info["lora_rank"] == 4
    # The same scale, alpha / rank, for half the rank.
    smaller = [*LORA[:1], "--lora.rank=4", "--lora.alpha=8"]
    with LocalTrainingClient(toy_config(tmp_path, *smaller)) as client:
        client.start_adapters(5, 4, ["self_attn", "mlp"]).result()
        pairs = [(run.step(), local_step(client)) for _ in range(4)]
    for found, expected in pairs:
        assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
    assert pairs[-1][0] < pairs[0][0]


def test_each_model_begins_with_new_adapters_and_samplers_keep_theirs(run):
    run.start_model(rank=8, seed=1)
    first, *_ = run.step(lr=0.1)
    sampler = run.sampler()
    sampled = run.sample(sampler, PROMPT, 1)["sequences"][0]
    run.start_model(rank=2, seed=1)
    assert run.step()[0] == pytest.approx(first, rel=1e-6)
    again = run.sample(sampler, PROMPT, 2)["sequences"][0]
    assert (again["tokens"], again["logprobs"]) == (sampled["tokens"], sampled["logprobs"])


def test_model_from_a_saved_state_keeps_its_rank_and_goes_on_as_it_would_have(run):
    run.start_model(rank=4, seed=5)
    run.step()
    path = run.train("save_weights", path="state")["path"]
    assert run.ask("weights_info", tinker_path=path)["lora_rank"] == 4
    expected = run.step(), run.step()
    for optimizer in (True, False):
        request = run.new_model(path=path, optimizer=optimizer)
        run.model = run.wait("load_weights", **request)["model_id"]
        assert run.ask("get_info", model_id=run.model)["lora_rank"] == 4
        found = run.step(), run.step()
        assert found[0] == expected[0] and (found == expected) is optimizer


def test_parts_that_a_client_leaves_out_do_not_train(tmp_path):
    with LocalTrainingClient(toy_config(tmp_path, *LORA)) as client:
        client.start_adapters(0, 3, ["self_attn"]).result()
        for _ in range(2):
            local_step(client)
        (part,) = client._trainer.engine.model_parts
        for name, parameter in part.named_parameters():
            if name.endswith(("lora_a", "lora_b")):
                rows = parameter if name.endswith("lora_a") else parameter.t()
                assert not torch.any(rows[3:]), name
                assert torch.any(rows[:3]) == ("attention" in name), name


def test_no_command_changes_the_model_of_another_client(tmp_path):
    assert changes(str(tmp_path)) == []


def test_states_that_do_not_fit_on_the_disk_stay_in_memory(tmp_path):
    expected = train(str(tmp_path / "memory"), 3, 2)
    found = train_on_full_disk(str(tmp_path / "full"), 3, 2)
    assert largest_difference(found, expected) == 0


def test_failed_load_leaves_the_rank_of_a_model(run, folder):
    run.start_model(rank=2, seed=1)
    smaller = run.train("save_weights", path="smaller")["path"]
    part = next((folder / "states" / smaller.removeprefix("tinker://")).glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-64])
    run.start_model(rank=8, seed=1)
    assert "is damaged" in run.train("load_weights", path=smaller)["error"]
    assert run.ask("get_info", model_id=run.model)["lora_rank"] == 8
    path = run.train("save_weights", path="after")["path"]
    assert run.ask("weights_info", tinker_path=path)["lora_rank"] == 8
    assert "is damaged" in run.wait("load_weights", **run.new_model(path=smaller))["error"]
    model = f"{run.session}:train:{run.n_models}"
    run.refuses(404, f"model {model} is unknown", "get_info", model_id=model)


def test_failed_save_leaves_the_saved_state_before_it_and_no_other(run):
    """On a full disk: no file may have more than 1 kB."""
    run.start_model(rank=4, seed=1)
    path = run.train("save_weights", path="first")["path"]
    expected, *_ = run.step()
    with files_of_at_most(1000):
        assert "second" in run.train("save_weights", path="second")["error"]
        assert "first" in run.train("save_weights", path="first", overwrite=True)["error"]
    answer = json.loads(run.send("GET", f"/api/v1/training_runs/{run.model}/checkpoints")[1])
    assert [saved["checkpoint_id"] for saved in answer["checkpoints"]] == ["weights/first"]
    run.train("load_weights", path=path)
    assert run.step()[0] == expected


def test_other_request_under_the_number_of_an_earlier_one_is_refused(run, url):
    """As from two programs that train one model, and each count their requests from 1."""
    other = Http(url)
    other.session, other.model = run.session, run.model
    run.forward_backward()
    body = forward_backward_message(run.model, run.n_sent, DATA[:1])
    status, answer = other.send("POST", "/api/v1/forward_backward", body)
    assert status == 400 and b"was accepted before with other content" in answer
    run.optim_step(lr=1e-2)
    request = {"model_id": run.model, "seq_id": run.n_sent, "adam_params": {}}
    other.refuses(400, "make a client for each program", "optim_step", **request)
    sampler = run.sampler()
    run.sample(sampler, PROMPT, 1)
    with pytest.raises(AssertionError, match="was accepted before with other content"):
        other.sample(sampler, PROMPT[:3], 1)
