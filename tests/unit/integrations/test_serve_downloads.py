"""Saved adapters are downloaded as `peft` reads them, by URLs that need no key but expire."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import torch

from tests.tiny_hf import tiny_hf_model
from tests.unit.integrations.tinker_server import LORA, Http, server_config, serving
from torchtitan.integrations.tinker import saved

PROMPT = [3, 1, 4, 1, 5]
DATA = [(PROMPT, {"target_tokens": [1, 4, 1, 5, 9], "weights": [1.0] * 5})]
KEY = "tml-secret"


class ClientWithKey(Http):
    def send(self, method, path, body=b"", headers=None):
        return super().send(method, path, body, {"X-API-Key": KEY, **(headers or {})})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("base")
    tiny_hf_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    weights = ("--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={base}")
    flags = (*LORA, f"--rl.serve.api_key_file={folder / 'key'}", "--checkpoint.enable", *weights)
    model = ("--model.name=qwen3", f"--model.hf_config={base}")
    with serving(server_config(folder, *flags, *model)) as url:
        yield url


@pytest.fixture
def run(url):
    client = ClientWithKey(url).begin()
    client.start_model(rank=4, seed=5)
    for _ in range(3):
        client.forward_backward(DATA)
        client.optim_step()
    yield client
    client.finish()


def get(client, path):
    status, body = client.send("GET", f"/api/v1/training_runs/{client.model}/checkpoints{path}")
    return status, json.loads(body)


def download(url):
    """The bytes at a URL, fetched as the published client does: without a key."""
    with urllib.request.urlopen(url, timeout=60) as response:
        body = response.read()
        assert len(body) == int(response.headers["Content-Length"])
        return body


def test_downloaded_adapters_give_peft_the_logprobs_of_the_server(run, base, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    path = run.train("save_weights_external", path="final")["path"]
    assert path == f"tinker://{run.model}/external_weights/final"
    status, answer = get(run, "/external_weights/final/external_weights_urls")
    assert status == 200 and answer["expires"].endswith("+00:00")
    assert sorted(answer["urls"]) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, url in answer["urls"].items():
        (tmp_path / name).write_bytes(download(url))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4, "the client's rank"
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, str(tmp_path))
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = logprobs[range(5), DATA[0][1]["target_tokens"]].tolist()
    found = run.forward_backward(DATA, forward_only=True)["loss_fn_outputs"][0]["logprobs"]["data"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_signed_urls_open_no_other_file_and_expire(run, monkeypatch):
    run.train("save_weights_external", path="a")
    url = get(run, "/external_weights/a/external_weights_urls")[1]["urls"]["adapter_config.json"]
    assert json.loads(download(url))["peft_type"] == "LORA"
    for wrong in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("/files/1", "/files/2"),
        url.replace("/a/", "/../a/"),
        urllib.parse.urljoin(url, f"/api/v1/training_runs/{run.model}/checkpoints"),
    ):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            download(wrong)
    later = time.time() + saved._SECONDS_VALID + 1
    monkeypatch.setattr(saved.time, "time", lambda: later)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        download(url)


def test_saved_states_are_listed_and_external_ones_deleted(run):
    run.train("save_weights", path="state")
    run.train("save_weights_external", path="b")
    path = f"/api/v1/training_runs/{run.model}/checkpoints/"
    assert run.send("PUT", path + "external_weights/b/ttl")[0] == 200
    found = {c["checkpoint_id"]: c for c in get(run, "")[1]["checkpoints"]}
    assert found["weights/state"]["checkpoint_type"] == "training"
    assert found["external_weights/b"]["checkpoint_type"] == "external"
    assert all(checkpoint["size_bytes"] > 1000 for checkpoint in found.values())
    status, answer = run.send("DELETE", path + "weights/state")
    assert status == 400 and b"only external_weights can be deleted by clients" in answer
    assert run.send("DELETE", path + "external_weights/b")[0] == 200
    assert [c["checkpoint_id"] for c in get(run, "")[1]["checkpoints"]] == ["weights/state"]
    status, answer = get(run, "/external_weights/b/external_weights_urls")
    assert status == 404 and "is not a saved state with adapters" in answer["detail"]


def test_published_client_downloads_a_saved_state(url, monkeypatch, tmp_path):
    tinker = pytest.importorskip("tinker")
    testing = pytest.importorskip("click.testing")
    for name, value in {"TELEMETRY": "0", "API_KEY": KEY, "BASE_URL": url}.items():
        monkeypatch.setenv(f"TINKER_{name}", value)
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model="any", rank=2).result()
    path = client.save_state("state").result().path
    rest = service.create_rest_client()
    found = rest.list_checkpoints(client.get_info().model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in found] == [path]
    # The command loads the state, saves external weights, downloads and deletes them.
    from tinker.cli.__main__ import main_cli

    done = testing.CliRunner().invoke(
        main_cli, ["checkpoint", "download", path, "--output", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    (config,) = tmp_path.glob("*/adapter_config.json")
    assert json.loads(config.read_text())["peft_type"] == "LORA"
    assert (config.parent / "adapter_model.safetensors").is_file()
    service.close("success").result()
