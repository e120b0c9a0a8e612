"""Weights go over TCP to the workers that the server's message told, and to no other program."""

import contextlib
import socket
import time
from types import SimpleNamespace

import pytest
import torch

from torchtitan.checkpoint.stream import bytes_of
from torchtitan.integrations.vllm_lane import WeightLane, join, receive

WEIGHTS = [
    ("a", torch.randn(300, 7).to(torch.bfloat16)),
    ("b", torch.tensor(3)),
    ("c", torch.ones(0)),
]


class Server:
    """Stands for two workers of a vLLM server, whose port strangers find first."""

    def __init__(self):
        self.at = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.at.getsockname()[1]}"
        self.strangers, self.workers, self.received = [], [], []

    def call(self, name, message):
        if name == "get_world_size":
            return {"world_size": 2}
        if name == "init_weight_transfer_engine":
            self.place = self.attack(**message["init_info"])
            info = SimpleNamespace(**message["init_info"])
            self.workers = [join(info, 1, 30), join(info, 0, 30)]
        if name == "update_weights":
            for worker in self.workers:
                tensors = [torch.empty_like(weight) for _, weight in WEIGHTS]
                receive(worker, tensors)
                self.received.append(tensors)

    def attack(self, master_address, master_port, **_):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", master_port), 30)
        wrong = SimpleNamespace(
            master_address=master_address, master_port=master_port, rank_offset=1, token="guess"
        )
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 32):
            self.strangers.append(socket.create_connection((master_address, master_port), 30))
            self.strangers[-1].sendall(greeting)
        self.strangers += [join(wrong, 0, 30), join(wrong, 1, 30)]
        return master_address, master_port


def test_lane_takes_the_workers_that_were_told_at_one_address_and_then_closes_its_port():
    server, started = Server(), time.monotonic()
    lane = WeightLane("gloo", server.call, server.url, timeout_seconds=60)
    assert time.monotonic() - started < 30
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.place, 30)
    lane.send(WEIGHTS, version=1)
    assert len(server.received) == 2
    for tensors in server.received:
        for found, (_, sent) in zip(tensors, WEIGHTS, strict=True):
            assert torch.equal(bytes_of(found), bytes_of(sent))
    for stranger in server.strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
