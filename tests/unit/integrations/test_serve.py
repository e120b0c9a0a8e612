"""The HTTP server, tested with raw requests; test_serve_tinker.py uses the published client."""

import contextlib
import functools
import json
import math
import random
import re
import signal
import socket
import threading
import time
from unittest.mock import MagicMock

import pytest

from tests.reliability import jobs
from tests.unit.integrations.tinker_server import (
    DATA,
    PROMPT,
    Http,
    at_once,
    forward_backward_message,
    local_step,
    part,
    server_config,
    serving,
)
from tests.unit.rl.toy import toy_config
from torchtitan.config.checks import ConfigError
from torchtitan.integrations.tinker import http, policy, results, service, wire
from torchtitan.integrations.tinker.client import LocalSamplingClient, LocalTrainingClient
from torchtitan.integrations.tinker.http import Access, HttpServer
from torchtitan.integrations.tinker.request_queue import Command
from torchtitan.integrations.tinker.requests import Answer, Refused
from torchtitan.rl.checks import api_key, check_server_config
from torchtitan.rl.serve import Server
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.logging import logger

SCORED = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "num_samples": 3}


def test_training_over_http_is_training_in_this_process(run, tmp_path):
    with LocalTrainingClient(toy_config(tmp_path)) as client:
        for _ in range(3):
            assert run.step() == pytest.approx(local_step(client), rel=1e-6)


def test_new_model_begins_with_the_first_weights(run, url):
    before = run.logprobs()
    run.step()
    assert run.logprobs() != before
    run.finish()
    again = Http(url).start()
    run.session = again.session  # finished by the fixture
    assert again.logprobs() == before


def test_last_tokens_of_a_prompt_are_scored_alone(run):
    sampler = run.sampler()
    whole = run.sample(sampler, PROMPT, 0, **SCORED)
    last = run.sample(sampler, PROMPT, 1, **SCORED, prompt_logprobs_last_n=1)
    for name in ("prompt_logprobs", "topk_prompt_logprobs"):
        assert last[name] == [None] * 3 + whole[name][3:]
    for key, value in (("topk_prompt_logprobs", 33), ("prompt_logprobs_last_n", 5)):
        with pytest.raises(AssertionError, match=f"{key} must be"):
            run.sample(sampler, PROMPT, 2, **{key: value})


def test_samples_that_wait_together_are_drawn_together(run, url, monkeypatch):
    sampler, asked, sample = run.sampler(), [], LocalSamplingClient._sample
    monkeypatch.setattr(
        LocalSamplingClient, "_sample", lambda *args: (asked.append(len(args[1])), sample(*args))[1]
    )
    found = at_once(lambda i: Http(url).sample(sampler, [i, i + 1], i), range(24))
    assert sum(asked) == 24 and len(asked) <= 6, asked
    for i, answer in enumerate(found):
        alone = run.sample(sampler, [i, i + 1], 100 + i)
        assert answer["sequences"][0]["tokens"] == alone["sequences"][0]["tokens"]


def test_request_that_is_sent_twice_is_carried_out_once(run):
    run.forward_backward()
    step = {"model_id": run.model, "seq_id": 50, "adam_params": {"learning_rate": 1e-2}}
    first, second = run.ask("optim_step", **step), run.ask("optim_step", **step)
    assert first == second and run.result(first) == run.result(second)
    sampler = run.sampler()
    assert run.sample(sampler, PROMPT, 0) == run.sample(sampler, PROMPT, 0)


def test_one_poll_tells_of_all_samples_of_a_session(run):
    sampler = run.sampler()
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    sent = [run.sample(sampler, PROMPT, i, wait=False)["request_id"] for i in range(3)]
    cursor, told = 0, []
    while len(told) < 3:
        found = run.ask("retrieve_futures", target=target, prev_cursor=cursor)
        cursor, told = found["cursor"], told + found["completions"]
    assert [entry["request_id"] for entry in told] == sent
    assert {entry["state"] for entry in told} == {"finished"}
    again = run.ask("retrieve_futures", target=target, prev_cursor=cursor, timeout=0)
    assert again == {"completions": [], "cursor": cursor}


def test_saved_states_are_loaded_and_sampled_from(run):
    run.step()
    state = run.train("save_weights", path="step-1")["path"]
    weights = run.train("save_weights_for_sampler", path="step-1")["path"]
    assert weights == f"tinker://{run.model}/sampler_weights/step-1"
    before = run.logprobs()
    expected = run.sample(run.sampler(), PROMPT, 0, prompt_logprobs=True)
    run.step()

    session = {"session_id": run.session, "sampling_session_seq_id": 70, "model_path": weights}
    sampler = run.ask("create_sampling_session", **session)["sampling_session_id"]
    assert run.sample(sampler, PROMPT, 0, prompt_logprobs=True) == expected
    run.model = run.wait("load_weights", **run.new_model(path=state, optimizer=True))["model_id"]
    run.n_sent = 0
    assert run.logprobs() == before


def test_oldest_samplers_are_dropped_but_never_the_first_weights(run, tmp_path, monkeypatch):
    for module in (policy, service):
        monkeypatch.setattr(module, "MOST_SAMPLERS", 2)
    samplers = [run.sampler() for _ in range(3) if run.forward_backward()]
    own = policy.Policy(MagicMock(shares_passes=False), toy_config(tmp_path))
    for name in "abc":
        own.snapshot(name)
    for name in ("b", "c", policy.BASE):
        own.sample([], name, ())
    with pytest.raises(ValueError, match="sampler a does not exist or was dropped; make another"):
        own.sample([], "a", ())
    for name, status in zip(samplers, (404, 200, 200), strict=True):
        assert run.send("GET", f"/api/v1/samplers/{name}")[0] == status


def test_base_model_of_another_name_is_not_sampled(run):
    request = {"session_id": run.session, "sampling_session_seq_id": 900}
    words = "must be 'policy', the model that this server samples, got 'Qwen/8B'; start a server"
    run.refuses(400, words, "create_sampling_session", **request, base_model="Qwen/8B")
    for name in ("policy", "any"):
        run.ask("create_sampling_session", **request, base_model=name)


def test_newer_model_of_a_session_is_logged_and_a_rank_must_be_positive(run, caplog):
    options = run.new_model()
    words = "lora_config.rank must be at least 1, got -5"
    run.refuses(400, words, "create_model", **options, lora_config={"rank": -5})
    newer = run.wait("create_model", **options, lora_config={"rank": 5})["model_id"]
    assert f"model {newer} takes the policy over from {run.model}" in caplog.text
    run.refuses(404, "a newer model took the policy over", "get_info", model_id=run.model)


def test_second_session_waits_until_the_owner_is_silent_or_shows_that_it_lives(
    run, url, monkeypatch
):
    heartbeat = functools.partial(run.ask, "session_heartbeat", session_id=run.session)
    monkeypatch.setattr(service, "SECONDS_UNTIL_GONE", 60)
    heartbeat()
    other = Http(url).begin()
    model = other.new_model()
    is_answered = threading.Event()

    def beat():
        while not is_answered.wait(0.1):
            heartbeat()

    beats = threading.Thread(target=beat)
    beats.start()
    status, answer = other.post("create_model", **model)
    is_answered.set()
    beats.join()
    assert status == 400 and "owns this server's only policy; close that" in answer["detail"]
    monkeypatch.setattr(service, "SECONDS_UNTIL_GONE", 1.0)
    heartbeat()
    status, answer = other.send("GET", f"/api/v1/training_runs/{run.model}")  # no sign of life
    assert status == 200 and json.loads(answer)["is_lora"] is False
    assert other.post("create_model", **model)[0] == 200, "as after the owner was killed"
    run.refuses(404, "its session has ended", "get_info", model_id=run.model)
    run.session = other.session  # finished by the fixture


def test_call_with_an_image_fails_the_step_and_not_the_next(run):
    image = run.forward_backward([([1], {"target_tokens": [2]})], chunk=2)
    assert "must be text tokens, got an image or audio (datum 0)" in image["error"]
    assert "a forward_backward of this step failed" in run.optim_step()["error"]
    run.forward_backward()
    assert "metrics" in run.optim_step()


def test_numbers_that_are_not_finite_reach_no_gradient_and_no_answer(run):
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [1.0, float("nan")]}
    failed = run.forward_backward([([1, 2], inputs)], "importance_sampling")
    assert "advantages of a Datum must be finite, got nan at token 1" in failed["error"]
    inputs |= {"advantages": [1.0, 1.0], "logprobs": [-1.0, -1000.0]}
    failed = run.forward_backward([([1, 2], inputs)], "importance_sampling")
    assert "the loss is -inf" in failed["error"] and failed["category"] == "user"
    assert "of this step failed" in run.optim_step()["error"]
    clipped = run.forward_backward([([1, 2], inputs)], "ppo")
    first = clipped["loss_fn_outputs"][0]["logprobs"]["data"][0]
    expected = -(math.exp(first + 1) + 1.2)  # the second ratio, e^996, is clipped
    assert clipped["metrics"]["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert run.optim_step()["metrics"]["grad_norm"] < 10


def test_targets_of_the_prompt_are_in_no_ratio(run):
    """gspo with the mask that Tinker knows and without; importance_sampling on policy."""
    inputs = {"target_tokens": [2, 3, 4], "advantages": [0.0, 1.0, 1.0]}
    inputs["logprobs"] = [0.0, -3.0, -3.0]
    masked = inputs | {"sequence_ratio_mask": [0.0, 1.0, 1.0]}
    config = {"clip_high_threshold": 100.0, "clip_low_threshold": 0.01}
    for given in (masked, inputs):
        found = run.forward_backward([([1, 2, 3], given)], "gspo", config=config)
        new = found["loss_fn_outputs"][0]["logprobs"]["data"]
        ratio = math.exp((sum(new[1:]) + 6.0) / 2)
        assert found["metrics"]["loss:sum"] == pytest.approx(-2 * ratio, rel=1e-4)
    assert new[0] < 0  # the prompt's targets are scored all the same
    on_policy = inputs | {"logprobs": [0.0, *new[1:]]}
    metrics = run.forward_backward([([1, 2, 3], on_policy)], "importance_sampling")["metrics"]
    assert metrics["ratio_mean:mean"] == pytest.approx(1)
    assert abs(metrics["kl_generator:mean"]) < 1e-6


@pytest.mark.parametrize(
    ("path", "values", "status", "message"),
    [
        ("asample", {}, 400, "the request needs sampling_session_id, which must be a string"),
        ("asample", {"sampling_session_id": "x"}, 404, "sampling session x is unknown"),
        ("asample", {"topk_sample_logprobs": 3}, 400, "topk_sample_logprobs is not supported"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, 400, "the optimizer is AdamW"),
        ("optim_step", {"adam_params": {"learning_rate": None}}, 400, "null, which stands for NaN"),
        ("get_info", {"model_id": "none"}, 404, "model none is unknown, or its session has ended"),
        ("session_heartbeat", {"session_id": "gone"}, 410, "make a new ServiceClient"),
        ("retrieve_future", {"request_id": "never"}, 410, "request never is unknown"),
        ("weights_info", {"tinker_path": "tinker://../../etc/weights/x"}, 400, "a saved state is"),
        ("create_custom_loss", {}, 404, "POST /api/v1/create_custom_loss is not supported"),
    ],
)
def test_wrong_requests_are_named(url, path, values, status, message):
    Http(url).refuses(status, message, path, **values)


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"[" * 100_000, {}, 400, "not valid JSON"),
        (b"", {"Content-Length": str(2**40)}, 413, "raise rl.serve.max_request_mib"),
        (b"", {"Content-Length": "-1"}, 411, "need a Content-Length"),
        (b"", {"X": "y" * 2**17}, 400, "the request is not HTTP/1.1 with short headers"),
        (b"{}", {"Content-Encoding": "zstd"}, 415, "must not be compressed"),
        (b"{}", {"Origin": "http://example.org"}, 403, "web pages are not answered"),
        (b"{}", {"Host": "127.0.0.1.example.org:80"}, 403, "add the name to rl.serve.names"),
        (b'{"tags": 1e999}', {}, 400, "numbers must be finite, got 1e999"),
    ],
)
def test_broken_requests_are_refused(url, body, headers, status, message):
    found, answer = Http(url).send("POST", "/api/v1/create_session", body, headers)
    assert found == status and message in json.loads(answer)["detail"]


def test_cut_and_changed_messages_get_one_kind_of_error():
    rng = random.Random(0)
    whole = forward_backward_message("m", 1, DATA, config={"clip_low_threshold": 0.5})
    n_refused = 0
    for _ in range(2000):
        body = bytearray(whole[: rng.randrange(len(whole))])
        for _ in range(rng.randrange(4)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            wire.read_forward_backward(bytes(body), lambda _: None)
        except ValueError as error:
            assert "the request is not a message of the tinker client" in str(error)
            n_refused += 1
    assert n_refused > 1000


@pytest.mark.parametrize(
    "entries", [b"\x1a\x00" * 2**22, part(3, part(2, b"") * 2**20), b"\x10\x01" * 2**20]
)
def test_entries_of_a_request_are_bounded_before_they_are_parsed(entries, monkeypatch):
    """Without a limit, reading them takes minutes, and parsing them 20 times their memory."""
    monkeypatch.setattr(wire, "_MESSAGES", {})
    began = time.process_time()
    with pytest.raises(ValueError, match="may have 262144 Datums, chunks and loss inputs"):
        wire.read_forward_backward(part(1, "m") + entries, lambda _: None)
    assert time.process_time() - began < 2


# ---- connections, without a policy ----


@contextlib.contextmanager
def listening(*access):
    server = HttpServer("127.0.0.1", 0, 2**20, Access(*access), lambda *_: Answer({}))
    server.start()
    try:
        yield server
    finally:
        server.close()


def test_connections_without_a_request_are_closed_and_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 4)
    with listening() as server, contextlib.ExitStack() as stack:
        for i in range(20):
            half_open = stack.enter_context(socket.create_connection((server.host, server.port)))
            if i % 2:
                half_open.sendall(b"POST / HTTP/1.1\r\nContent-Le")
        assert Http(server.url).send("GET", "/")[0] == 200
        assert len(server._open) <= 4
        monkeypatch.setattr(http, "_SECONDS_IDLE", 0.1)
        for sent in (b"", b"POST / HT"):
            idle = stack.enter_context(socket.create_connection((server.host, server.port)))
            idle.settimeout(60)
            idle.sendall(sent)
            assert idle.recv(1) == b""


def test_request_that_comes_byte_by_byte_has_one_deadline(monkeypatch):
    monkeypatch.setattr(http, "_SECONDS_PER_REQUEST", 0.3)
    with listening() as server, socket.create_connection((server.host, server.port)) as client:
        client.settimeout(0.1)
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n")
        answer, n_sent = b"", 0
        while not answer and n_sent < 50:
            with contextlib.suppress(ConnectionError):  # it may be closed by now
                client.sendall(b"x")
            n_sent += 1
            with contextlib.suppress(TimeoutError):
                answer = client.recv(999)
        assert b"408" in answer


def test_key_and_host_name_of_requests():
    key = {"X-API-Key": "tml-mine"}
    with listening(("localhost", "box.example.org"), "tml-mine") as server:
        for headers, status in (
            ({}, 401),
            ({"X-API-Key": "tml-other"}, 401),
            (key, 200),
            (key | {"Host": "box.example.org:8000"}, 200),
            (key | {"Host": "[::1]:8000"}, 200),
            (key | {"Host": "example.org"}, 403),
            (key | {"Host": "["}, 403),
        ):
            found, body = Http(server.url).send("POST", "/", b"x" * 9, headers)
            assert found == status, headers
            assert b"tml-mine" not in body


def test_key_is_read_from_its_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("tml-one\n")
    config = toy_config(tmp_path, f"--rl.serve.api_key_file={path}")
    check_server_config(config)
    assert api_key(config.rl.serve) == "tml-one"
    path.write_text("two words")
    with pytest.raises(ConfigError, match="must be a file with one key"):
        check_server_config(config)


def test_key_that_others_can_read_is_told(tmp_path, monkeypatch):
    told, path = [], tmp_path / "key"
    monkeypatch.setattr(logger, "warning", lambda text, *values: told.append(text % values))
    path.write_text("tml-one")
    for mode in (0o600, 0o644):
        path.chmod(mode)
        with serving(server_config(tmp_path, f"--rl.serve.api_key_file={path}")):
            pass
    (sentence,) = [text for text in told if "other users" in text]
    assert sentence == f"other users may read or change the key in {path} (mode 644): chmod 600"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("host=example", "rl.serve.host must be an IP address, got 'example'"),
        ("names=Box:80", "must be host names in lower case, .* got 'Box:80'"),
        ("max_models=0", "rl.serve.max_models must be at least 1"),
        ("api_key_file=/dev/zero", "got no such file in"),
    ],
)
def test_config_of_the_server_is_checked(tmp_path, flag, message):
    with pytest.raises(ConfigError, match=message):
        check_server_config(toy_config(tmp_path, f"--rl.serve.{flag}"))


def test_address_in_use_is_a_config_error(url, tmp_path):
    server = Server(toy_config(tmp_path, f"--rl.serve.port={url.rpartition(':')[2]}"))
    with pytest.raises(ConfigError, match="must be free to listen at"):
        server.train()
    server.close()


def test_other_base_models_are_refused_on_request(tmp_path):
    config = server_config(tmp_path, "--rl.serve.only_base_model", "--rl.serve.base_model=toy/one")
    with serving(config) as url:
        model = (client := Http(url).begin()).new_model(base_model="Qwen/Qwen3-8B")
        client.refuses(400, "base_model must be 'toy/one'", "create_model", **model)


def test_sigterm_ends_the_server_cleanly_and_its_states_are_its_users_only(tmp_path):
    settings = f"model.name=rl_toy training.seq_len=16 rl.serve.port=0 job.dump_folder={tmp_path}"
    flags = jobs.flags_in(settings)
    job = jobs.start(flags, tmp_path / "logs", module="torchtitan.rl.serve")
    try:
        deadline = time.monotonic() + 90
        while not (at := re.search(r"serving policy at (http://127\.0\.0\.1:\d+)\n", job.output())):
            assert job.is_running() and time.monotonic() < deadline, job.output()
            time.sleep(0.02)
        client = Http(at[1]).start()
        sampler = client.sampler()
        client.train("save_weights", path="state")
        (state,) = tmp_path.rglob("weights/state")
        saved = [state, *state.rglob("*")]
        assert len(saved) > 3 and not any(path.stat().st_mode & 0o077 for path in saved)
        waiting = [client.sample(sampler, [1, 2], i, wait=False) for i in range(4)]
        job.send(signal.SIGTERM)
        outcome = job.wait(60)
    finally:
        job.kill()
    assert outcome.exit_codes == [0], outcome.output
    assert waiting and "the server has ended" in outcome.output
    assert "Traceback" not in outcome.output


def _numbers_of(url):
    """(losses of three steps, then log-probs and top tokens of a prompt)."""
    run, losses = Http(url).start(), []
    for _ in range(3):
        sampler = run.sampler()
        drawn = run.sample(sampler, PROMPT, 0, **SCORED)
        losses.append(run.step()[0])
        assert run.sample(sampler, PROMPT, 1, **SCORED) == drawn
    assert "error" in run.forward_backward([([1], {"target_tokens": [2, 3]})])
    return losses, drawn["prompt_logprobs"], drawn["topk_prompt_logprobs"]


def _serve_on_two_ranks(folder):
    server, found = Server(server_config(folder)), []

    def use(url):
        found.append(_numbers_of(url))
        server.stop()

    server.train(lambda url: threading.Thread(target=use, args=(url,)).start())
    server.close()
    return found


def test_two_fsdp_ranks_serve_as_one_does(tmp_path):
    (tmp_path / "two").mkdir()
    ranks = run_ranks(_serve_on_two_ranks, 2, str(tmp_path / "two"), timeout_seconds=240)
    ((losses, logprobs, top),) = ranks[0]
    with serving(server_config(tmp_path / "one")) as url:
        expected_losses, expected_logprobs, expected_top = _numbers_of(url)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert logprobs[1:] == pytest.approx(expected_logprobs[1:], abs=1e-4)
    for ours, theirs in zip(top[1:], expected_top[1:], strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert dict(ours) == pytest.approx(dict(theirs), abs=1e-4)


def test_results_beyond_the_limit_are_dropped_and_not_computed_again(monkeypatch):
    monkeypatch.setattr(results, "_MAX_BYTES", 1000)
    commands = []
    kept = results.Results(commands.append)

    def send(number, n_bytes=300):
        answer = Answer(protobuf=bytes([number]) * n_bytes)
        kept.submit(str(number), {}, Command("m", {}), lambda _: answer)
        if len(commands) > number:
            commands[number].answer(None)

    for number in range(3):
        send(number)
    kept.retrieve("1")
    send(3)  # 1,200 bytes: the result that was fetched goes first
    assert kept.retrieve("2").protobuf[0] == 2
    with pytest.raises(Refused, match="request 1 is unknown, or was fetched long ago") as raised:
        kept.retrieve("1")
    assert raised.value.status == 410
    send(1)
    assert len(commands) == 4 and kept._n_bytes == 900, "its id is known, so it does not run again"
    monkeypatch.setattr(results, "_MAX_KNOWN", 4)
    send(4)
    assert list(kept._all) == ["0", "3", "4"], "half goes, and first those that were fetched"
    assert kept.retrieve("0").protobuf[0] == 0 and kept._n_bytes == 900
