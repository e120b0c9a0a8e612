"""Clients of the tinker server that train at once, against the same clients one after the other.

    python benchmarks/tinker_clients.py                       # 16 clients, 0.5M and 3M parameters
    python benchmarks/tinker_clients.py --clients 4 --datums 8
    python benchmarks/tinker_clients.py --unembed             # the output projection has adapters, too
    python benchmarks/tinker_clients.py --sizes experts       # a mixture of experts with adapters

A server runs in a process of its own, with adapters beside one small model. Clients send requests over
HTTP from this process: `forward_backward` and `optim_step` for each step, as tinker-cookbook's loops do.
Rounds in which all clients train at once alternate with rounds in which one client after the other takes
its steps. Prints the server's CPU-seconds of a client's step (median of the rounds), the median of the rounds'
ratios, and the largest relative difference of the losses in both kinds of rounds. "The policy" is the same
without HTTP. Also prints the memory that a further client takes: adapters, gradients and moments.
"""

import argparse
import dataclasses
import http.client
import multiprocessing
import random
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# family, flavor, changes
SIZES = {
    "0.5M": ("llama3", "debugmodel", {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}),
    "3M": ("llama3", "debugmodel", {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}),
    "experts": ("qwen3", "debugmodel_moe_small", {"dim": 128, "n_layers": 2, "moe_inter_dim": 64}),
}
VOCAB = 256


def config_of(size: str, options: argparse.Namespace, folder: str):
    """Return the config of a server with one small model."""
    import torch

    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.rl.job_config import JobConfig

    torch.set_num_threads(1)
    family, flavor, changes = SIZES[size]
    spec = get_train_spec(family)
    args = dataclasses.replace(spec.model_args[flavor], vocab_size=VOCAB, **changes)
    spec = dataclasses.replace(spec, model_args={"small": args}, build_tokenizer_fn=None)
    register_train_spec(f"small {size}", spec)
    return ConfigManager(JobConfig).parse_args(
        [
            f"--model.name=small {size}",
            "--model.flavor=small",
            f"--job.dump_folder={folder}",
            f"--training.seq_len={options.tokens}",
            "--training.local_batch_size=64",
            "--training.mixed_precision_param=float32",
            "--activation_checkpoint.mode=none",
            "--lr_scheduler.warmup_steps=0",
            "--debug.seed=1",
            "--model.converters=lora",
            f"--lora.rank={options.rank}",
            f"--lora.target_modules=all-linear{',lm_head' * options.unembed}",
            "--rl.serve.port=0",
            f"--rl.serve.max_models={2 * options.clients + 2}",
        ]
    )


def serve(size: str, options: argparse.Namespace, folder: str, pipe: Connection) -> None:
    """Serve until a message is false; answer the others with the CPU-seconds of this process."""
    from torchtitan.rl.serve import Server

    server = Server(config_of(size, options, folder))

    def answer() -> None:
        while pipe.recv():
            pipe.send(time.process_time())
        server.stop()

    def start(url: str) -> None:
        pipe.send(url)
        threading.Thread(target=answer).start()

    server.train(start)
    server.close()


def client_of(url: str, rank: int, seed: int):
    """Return a client with a model and a connection of its own, as the published client has."""
    from tests.unit.integrations.test_serve_lora import Client

    class Connected(Client):
        connection = None

        def send(self, method, path, body=b"", headers=None):
            for is_new in (False, True):  # the server closes idle connections
                if is_new or self.connection is None:
                    self.connection = http.client.HTTPConnection(self.address)
                try:
                    self.connection.request(method, path, body, headers or {})
                    response = self.connection.getresponse()
                    return response.status, response.read()
                except ConnectionError:
                    if is_new:
                        raise

    client = Connected(url)
    client.session = client.ask("create_session", tags=[], sdk_version="0")["session_id"]
    client.start_model(rank=rank, seed=seed)
    return client


def steps(client, data: list, n: int) -> list[float]:
    """Take steps and return the losses."""
    losses = []
    for _ in range(n):
        losses.append(client.forward_backward(data)["metrics"]["loss:sum"])
        assert "error" not in client.optim_step(lr=1e-3)
    return losses


def data_of(seed: int, options: argparse.Namespace) -> list:
    generator = random.Random(seed)
    data = []
    for _ in range(options.datums):
        tokens = [generator.randrange(VOCAB) for _ in range(options.tokens + 1)]
        data.append((tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * options.tokens}))
    return data


def measure(size: str, options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(size, options, folder, other))
        process.start()
        url = pipe.recv()

        def used() -> float:
            pipe.send(True)
            return pipe.recv()

        # Two clients with the same seed: one trains beside the others, its twin alone.
        ranks = [1 + n % options.rank for n in range(options.clients)]
        at_once = [client_of(url, rank, n) for n, rank in enumerate(ranks)]
        alone = [client_of(url, rank, n) for n, rank in enumerate(ranks)]
        data = [data_of(n, options) for n in range(options.clients)]
        losses: dict[str, list] = {"at once": [], "alone": []}
        seconds: dict[str, list[float]] = {"at once": [], "alone": []}
        for _ in range(options.rounds + 1):
            for kind in losses:
                found: list = [None] * options.clients

                def take(n: int, clients: list, found: list = found) -> None:
                    found[n] = steps(clients[n], data[n], options.steps)

                before = used()
                if kind == "at once":
                    threads = [
                        threading.Thread(target=take, args=(n, at_once)) for n in range(len(found))
                    ]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                else:
                    for n in range(len(found)):
                        take(n, alone)
                spent = used() - before
                seconds[kind].append(spent / (options.steps * options.clients))
                losses[kind].append(found)
        pipe.send(None)
        process.join()
    report(f"{size} over HTTP", seconds, losses)


def measure_policy(size: str, options: argparse.Namespace) -> None:
    """As `measure`, of the policy's commands alone: no HTTP, and nothing to read or to write."""
    from torchtitan.integrations.tinker.client import LocalTrainingClient
    from torchtitan.integrations.tinker.policy import Policy
    from torchtitan.integrations.tinker.types import AdamParams, Datum, ModelInput
    from torchtitan.integrations.tinker.wire import ForwardBackwardRequest

    losses: dict[str, list] = {"at once": [], "alone": []}
    seconds: dict[str, list[float]] = {"at once": [], "alone": []}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(size, options, folder)
        with LocalTrainingClient(config) as client:
            policy = Policy(client, config)
            requests = []
            for n in range(options.clients):
                data = [Datum(ModelInput(tuple(x)), inputs) for x, inputs in data_of(n, options)]
                requests.append(ForwardBackwardRequest("", 0, data, "cross_entropy", {}, False))
                for kind in losses:
                    adapters = {
                        "seed": n,
                        "rank": 1 + n % options.rank,
                        "layers": ["self_attn", "mlp", *["output"] * options.unembed],
                    }
                    policy.start_model(adapters, f"{kind} {n}")
            for _ in range((options.rounds + 1) * options.steps):
                for kind in losses:
                    items = [(f"{kind} {n}", request) for n, request in enumerate(requests)]
                    updates = [(name, AdamParams(learning_rate=1e-3)) for name, _ in items]
                    before, found = time.process_time(), []
                    for i in range(1 if kind == "at once" else len(items)):
                        own = slice(None) if kind == "at once" else slice(i, i + 1)
                        found += policy.forward_backward(items[own])
                        policy.optim_step(updates[own])
                    seconds[kind].append((time.process_time() - before) / len(items))
                    losses[kind].append([output.metrics["loss:sum"] for output in found])
            policy.forward_backward(items[:2])
            (state,) = policy._waiting.get([items[0][0]])
            n_bytes = sum(tensor.nbytes for tensor in state.tensors())
            n_values = sum(weight.numel() for weight in state.weights.values())
            policy.close()
    report(f"{size}, the policy", seconds, losses)
    print(
        f"    {n_bytes:,} bytes a client, for {n_values:,} values of adapters of rank {options.rank}"
    )


def report(name: str, seconds: dict[str, list[float]], losses: dict[str, list]) -> None:
    """Print the medians of all rounds but the first, and what the losses differ by."""
    at_once, alone = (statistics.median(seconds[kind][1:]) for kind in ("at once", "alone"))
    ratios = [a / b for a, b in zip(seconds["alone"][1:], seconds["at once"][1:], strict=True)]
    pairs = zip(_flat(losses["at once"]), _flat(losses["alone"]), strict=True)
    difference = max(abs(a - b) / max(abs(b), 1.0) for a, b in pairs)
    print(
        f"{name}: {1000 * at_once:.1f} ms of CPU a step at once, {1000 * alone:.1f} one after the "
        f"other: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}); "
        f"losses differ by {difference:.1e}",
        flush=True,
    )


def _flat(nest):
    if isinstance(nest, list):
        return [x for part in nest for x in _flat(part)]
    return [nest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8, help="of the largest adapters")
    parser.add_argument("--datums", type=int, default=1, help="sequences of a client's step")
    parser.add_argument("--tokens", type=int, default=16, help="of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind, after one to warm up")
    parser.add_argument(
        "--unembed", action="store_true", help="train_unembed of the clients has effect"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5M", "3M"])
    options = parser.parse_args()
    for size in options.sizes:
        measure_policy(size, options)
        measure(size, options)


if __name__ == "__main__":
    main()
