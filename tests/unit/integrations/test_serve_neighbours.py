"""A command of one client changes no other client's model; a failed command changes nothing."""

import json

import pytest

from tests.unit.integrations.test_serve import DATA, server_config
from tests.unit.integrations.test_serve_lora import LORA, Client
from tests.unit.integrations.tinker_server import forward_backward_message, serving
from tests.unit.rl.neighbours import changes, files_of_at_most, train_on_full_disk
from tests.unit.rl.together import largest_difference, train


def test_no_command_changes_the_model_of_another_client(tmp_path):
    assert changes(str(tmp_path)) == []


def test_states_that_do_not_fit_on_the_disk_stay_in_memory(tmp_path):
    expected = train(str(tmp_path / "memory"), 3, 2)
    found = train_on_full_disk(str(tmp_path / "full"), 3, 2)
    assert largest_difference(found, expected) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def url(folder):
    with serving(server_config(folder, *LORA)) as url:
        yield url


@pytest.fixture
def run(url):
    client = Client(url).start()
    yield client
    client.ask(f"sessions/{client.session}/finish", reason={"type": "success"})


def saved_names(run):
    answer = json.loads(run.send("GET", f"/api/v1/training_runs/{run.model}/checkpoints")[1])
    return [saved["checkpoint_id"] for saved in answer["checkpoints"]]


def test_failed_load_leaves_the_rank_of_a_model_and_the_failure_of_its_step(run, folder):
    run.start_model(rank=2, seed=1)
    run.forward_backward(DATA)
    run.optim_step()
    smaller = run.train("save_weights", path="smaller")["path"]
    part = next((folder / "states" / smaller.removeprefix("tinker://")).glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-64])
    run.start_model(rank=8, seed=1)
    run.forward_backward(DATA)
    run.optim_step()
    assert "error" in run.forward_backward([([1], {"target_tokens": [99], "weights": [1.0]})])
    assert "is damaged" in run.train("load_weights", path=smaller)["error"]
    assert run.ask("get_info", model_id=run.model)["lora_rank"] == 8
    assert "a forward_backward of this step failed" in run.optim_step()["error"]
    path = run.train("save_weights", path="after")["path"]
    assert run.ask("weights_info", tinker_path=path)["lora_rank"] == 8
    run.number += 1
    failed = run.wait("load_weights", session_id=run.session, model_seq_id=run.number, path=smaller)
    assert "is damaged" in failed["error"]
    status, _ = run.post("get_info", model_id=f"{run.session}:train:{run.number}")
    assert status == 404, "a model that could not be loaded does not exist"


def test_failed_save_leaves_the_saved_state_before_it_and_no_other(run):
    """On a full disk: no file may have more than 1 kB."""
    run.start_model(rank=4, seed=1)
    path = run.train("save_weights", path="first")["path"]
    expected = run.forward_backward(DATA)["metrics"]["loss:sum"]
    run.optim_step()
    with files_of_at_most(1000):
        assert "second" in run.train("save_weights", path="second")["error"]
        assert "first" in run.train("save_weights", path="first", overwrite=True)["error"]
    assert saved_names(run) == ["weights/first"]
    run.train("load_weights", path=path)
    assert run.forward_backward(DATA)["metrics"]["loss:sum"] == expected


def test_other_request_under_the_number_of_an_earlier_one_is_refused(run, url):
    """As from two programs that train one model, and each count their requests from 1."""
    other = Client(url)
    other.session, other.model, other.n_sent = run.session, run.model, run.n_sent
    losses = [run.forward_backward(DATA)["metrics"]["loss:sum"] for _ in range(2)]
    assert other.forward_backward(DATA)["metrics"]["loss:sum"] == losses[0], "sent again"
    body = forward_backward_message(run.model, run.n_sent, DATA[:1])
    status, answer = other.send("POST", "/api/v1/forward_backward", body)
    assert status == 400 and b"was accepted before with other content" in answer
    run.optim_step(lr=1e-2)
    request = {"model_id": run.model, "seq_id": run.n_sent}
    status, answer = other.post("optim_step", adam_params={"learning_rate": 1e-3}, **request)
    assert status == 400 and "make a client for each program" in answer["detail"]
    sampler = run.sampler()
    run.sample(sampler, [1, 2, 3], 1)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 4]}]}
    request = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt}
    status, answer = other.post("asample", sampling_params={"max_tokens": 4}, **request)
    assert status == 400 and "was accepted before with other content" in answer["detail"]
