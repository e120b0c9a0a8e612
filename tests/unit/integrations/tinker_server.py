"""A server of the toy policy for tests, and raw HTTP to talk to it."""

import contextlib
import http.client
import itertools
import json
import struct
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.unit.rl.toy import toy_config
from torchtitan.integrations.tinker.types import AdamParams, Datum, ModelInput
from torchtitan.rl.serve import Server

DATA = [
    ([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 2.0]}),
    ([5], {"target_tokens": [6], "weights": [1.0]}),
]
LOCAL_DATA = [Datum(ModelInput.from_ints(tokens), inputs) for tokens, inputs in DATA]
PROMPT = [1, 2, 3, 4]
LORA = ("--model.converters=lora", "--lora.rank=8", "--lora.alpha=16")


def server_config(folder, *overrides):
    return toy_config(folder, "--rl.serve.port=0", *overrides)


@contextlib.contextmanager
def serving(config):
    """The URL of a server, which runs on a thread."""
    server, urls, started = Server(config), [], threading.Event()
    thread = threading.Thread(
        target=server.train, args=(lambda u: (urls.append(u), started.set()),)
    )
    thread.start()
    try:
        assert started.wait(60)
        yield urls[0]
    finally:
        server.stop()
        thread.join(60)
        server.close()
    assert not thread.is_alive()


def local_step(client, lr=1e-2):
    """What `Http.step` returns, of a client in this process."""
    found = client.forward_backward(LOCAL_DATA, "cross_entropy").result()
    norm = client.optim_step(AdamParams(learning_rate=lr)).result().metrics["grad_norm"]
    logprobs = (x for output in found.loss_fn_outputs for x in output["logprobs"].tolist())
    return [found.metrics["loss:sum"], norm, *logprobs]


def at_once(function, arguments):
    """The results of a function for each argument, called in threads of their own."""
    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(function, arguments))


class Http:
    """Sends requests and returns (status, JSON, or a result in protobuf as the JSON that it stands for)."""

    def __init__(self, url):
        self.address = urllib.parse.urlparse(url).netloc
        self.n_sent, self.n_models = 0, -1

    def send(self, method, path, body=b"", headers=None):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    def post(self, path, /, **values):
        status, body = self.send("POST", "/api/v1/" + path, json.dumps(values).encode())
        return status, result_of(body) if body[:1] == b"\n" else json.loads(body)

    def ask(self, path, /, **values):
        """The answer to a request, which must succeed."""
        status, answer = self.post(path, **values)
        assert status == 200, answer
        return answer

    def refuses(self, status, words, path, /, **values):
        """The server must refuse a request with this status, and a sentence that has these words."""
        found, answer = self.post(path, **values)
        assert found == status and words in answer["detail"], answer

    def wait(self, path, /, **values):
        """The result of a request whose answer is a future."""
        return self.result(self.ask(path, **values))

    def result(self, accepted):
        while True:
            status, answer = self.post("retrieve_future", request_id=accepted["request_id"])
            if status != 408:
                assert status == 200, answer
                return answer

    # ---- a training run ----

    def start(self):
        self.begin().start_model(rank=8)
        return self

    def begin(self):
        self.session = self.ask("create_session", tags=[], sdk_version="0")["session_id"]
        return self

    def new_model(self, **values):
        """The fields of a request for a further model of the session."""
        self.n_models += 1
        own = {"session_id": self.session, "model_seq_id": self.n_models, "base_model": "any"}
        return own | values

    def start_model(self, **lora_config):
        request = self.new_model(lora_config=lora_config)
        self.model = self.wait("create_model", **request)["model_id"]

    def finish(self):
        self.ask(f"sessions/{self.session}/finish", reason={"type": "success"})

    def train(self, path, /, **values):
        self.n_sent += 1
        return self.wait(path, model_id=self.model, seq_id=self.n_sent, **values)

    def forward_backward(self, data=DATA, loss_fn="cross_entropy", **options):
        self.n_sent += 1
        body = forward_backward_message(self.model, self.n_sent, data, loss_fn, **options)
        status, answer = self.send("POST", "/api/v1/forward_backward", body)
        assert status == 200, answer
        return self.result(json.loads(answer))

    def logprobs(self):
        return self.forward_backward(forward_only=True)["loss_fn_outputs"]

    def optim_step(self, lr=1e-2):
        return self.train("optim_step", adam_params={"learning_rate": lr})

    def step(self, lr=1e-2):
        """[loss, gradient norm, log-probs of all targets] of a step."""
        found, norm = self.forward_backward(), self.optim_step(lr)["metrics"]["grad_norm"]
        logprobs = (x for output in found["loss_fn_outputs"] for x in output["logprobs"]["data"])
        return [found["metrics"]["loss:sum"], norm, *logprobs]

    def sampler(self):
        number = {"sampling_session_seq_id": self.n_sent}
        return self.train("save_weights_for_sampler", **number)["sampling_session_id"]

    def sample(self, sampler, tokens, seq_id, wait=True, num_samples=1, **values):
        params = {"max_tokens": 4, "temperature": 0.0} | values.pop("params", {})
        accepted = self.ask(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt={"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            num_samples=num_samples,
            sampling_params=params,
            **values,
        )
        return self.result(accepted) if wait else accepted


# ---- protobuf, written independently of the code under test ----


def varint(value):
    out = b""
    while True:
        value, low = value >> 7, value & 127
        out += bytes([low | (128 if value else 0)])
        if not value:
            return out


def part(number, value):
    if isinstance(value, int):
        return varint(number * 8) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number * 8 + 2) + varint(len(value)) + value


def tensor_message(values):
    is_float = any(isinstance(value, float) for value in values)
    data = struct.pack(f"<{len(values)}{'f' if is_float else 'q'}", *values)
    return part(1, data) + part(3, 1 if is_float else 2) + part(4, varint(len(values)))


def forward_backward_message(
    model, seq_id, data, loss_fn="cross_entropy", config=None, forward_only=False, chunk=1
):
    """data: (tokens, {name: values}) of each datum. chunk: 1 is text, 2 an image."""
    out = part(1, model) + part(2, seq_id)
    for tokens, inputs in data:
        text = part(1, struct.pack(f"<{len(tokens)}i", *tokens))
        datum = part(1, part(chunk, text))
        for name, values in inputs.items():
            datum += part(2, part(1, name) + part(2, tensor_message(values)))
        out += part(3, datum)
    out += part(4, loss_fn) + part(6, int(forward_only))
    for name, value in (config or {}).items():
        out += part(5, part(1, name) + b"\x11" + struct.pack("<d", value))
    return out


def fields(data):
    """(number, value) of each field of a message, read without its description."""
    for field in UnknownFieldSet(Empty.FromString(data)):
        is_double = field.wire_type == 1
        value = struct.unpack("<d", struct.pack("<Q", field.data))[0] if is_double else field.data
        yield field.field_number, value


def numbers(kind, data):
    """kind: of `struct`. NaN stands for none."""
    return [None if x != x else x for (x,) in struct.iter_unpack(f"<{kind}", data)]


def result_of(data):
    """The entries of a result of forward_backward, or of sampling."""
    found = list(fields(data))
    last = dict(found)
    if last[1] == b"ArrayRecord":
        tensor = dict(fields(dict(fields(dict(fields(last[2]))[2]))[2]))
        values, ends = numbers("f", tensor[1]), numbers("q", tensor[2])
        outputs = [values[a // 4 : b // 4] for a, b in itertools.pairwise(ends)]
        metrics = (dict(fields(entry)) for number, entry in found if number == 3)
        return {
            "loss_fn_outputs": [{"logprobs": {"data": values}} for values in outputs],
            "metrics": {entry[1].decode(): entry[2] for entry in metrics},
        }
    sequences = (dict(fields(entry)) for number, entry in found if number == 1)
    top = dict(fields(last.get(3, b"")))
    cells = list(zip(numbers("i", top.get(1, b"")), numbers("f", top.get(2, b"")), strict=True))
    k = top.get(3, 0)
    rows = [cells[i * k : i * k + k] for i in range(top.get(4, 0))]
    return {
        "sequences": [
            {
                "tokens": numbers("i", entry[2]),
                "logprobs": numbers("f", entry[3]),
                "stop_reason": ("stop", "length")[entry[1]],
            }
            for entry in sequences
        ],
        "prompt_logprobs": numbers("f", last[2]) if 2 in last else None,
        "topk_prompt_logprobs": [None if row[0] == (0, -99999.0) else row for row in rows],
    }
