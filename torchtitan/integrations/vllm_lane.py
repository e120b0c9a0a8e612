"""Sends weights to a vLLM server by vLLM's weight-transfer interface, without files.

The sender announces each step over HTTP: `init_weight_transfer_engine` once, then for each update
`start_weight_update`, `update_weights` for some tensors at a time, and `finish_weight_update`. The
tensors go from the sending rank to the server's workers. With "nccl" they go between GPUs, to vLLM's own
engine. With "gloo" (a name kept from earlier releases) they go from host memory over TCP, to
`torchtitan.integrations.vllm_receiver`. Written for vLLM 0.32.0.

Over TCP, the sender listens at one address until all workers have connected, each with a secret derived
from a token in the first message. With NCCL, torch's store accepts any connection: block its port
for other machines.
"""

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchtitan.checkpoint.stream import bytes_of
from torchtitan.rl.weight_transport import Pairs, WeightChanges, buckets_of, copied
from torchtitan.tools.admission import admit, digest_of
from torchtitan.tools.utils import get_device_type, run_beside, use_device

T = TypeVar("T")


def register() -> None:
    """Register our receiver as "gloo" with vLLM. vLLM calls this function in each of its processes."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        # This version of vLLM has no weight transfer.
        return
    # vLLM calls plug-ins again in processes that it forks.
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "gloo", "torchtitan.integrations.vllm_receiver", "GlooReceiver"
        )


def join(info: Any, worker: int, timeout_seconds: float) -> socket.socket:
    """Return this worker's connection to the sender. info: `WeightLane`'s message, as attributes."""
    connection = socket.create_connection((info.master_address, info.master_port), timeout_seconds)
    connection.sendall(_secret(info.token, info.rank_offset + worker))
    return connection


def receive(connection: socket.socket, tensors: Iterable[Tensor]) -> None:
    """Fill these CPU tensors with the next tensors from the sender."""
    for tensor in tensors:
        unfilled = memoryview(bytes_of(tensor).numpy())
        while unfilled:
            num_bytes = connection.recv_into(unfilled)
            if not num_bytes:
                raise ConnectionError("the rank that sends weights has closed its connection")
            unfilled = unfilled[num_bytes:]


def _secret(token: str, rank: int) -> bytes:
    return hmac.digest(token.encode(), str(rank).encode(), "sha256")


class WeightLane:
    """Sends one rank's weights to the workers of one vLLM server.

    backend: the backend in the server's `--weight-transfer-config '{"backend": ...}'`.
    call: takes an endpoint's name and a message, sends a POST, or a GET if the message is None, and returns
        the server's answer. After `call` has raised, the lane cannot be used again.
    url: the server's address. The lane listens at this machine's address on the route to the server.
    delta: send only the changes since the last update; for "gloo".
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        call: Callable[[str, dict[str, Any] | None], Any],
        url: str,
        timeout_seconds: float,
        delta: bool = False,
    ):
        self._call = call
        self._changes = WeightChanges() if delta else None
        size = 1 + call("get_world_size", None)["world_size"]
        to = urlsplit(url)
        server = to.hostname, to.port or (443 if to.scheme == "https" else 80)
        with socket.create_connection(server, timeout_seconds) as connection:
            address = connection.getsockname()[0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
        info = {
            "master_address": address,
            "master_port": server.getsockname()[1],
            # The sender is rank 0.
            "rank_offset": 1,
            "world_size": size,
            # Send each tensor as a separate message.
            "packed": False,
        }
        if backend == "gloo":
            self._device = torch.device("cpu")
            info["token"] = token = secrets.token_hex()
            expected = {digest_of(_secret(token, rank)): rank for rank in range(1, size)}
        else:
            self._device = torch.device(get_device_type(), torch.accelerator.current_device_index())
            # Free the port, because NCCL listens at it.
            server.close()

        def meet_workers() -> Any:
            if backend == "gloo":
                return [worker for _, worker in admit(server, expected, timeout_seconds)]
            from vllm.distributed.weight_transfer import nccl_common

            use_device(self._device)
            return nccl_common.trainer_init(info)

        # With "gloo": a list of connections. With "nccl": vLLM's communicator.
        self._workers = _beside(
            meet_workers, lambda: call("init_weight_transfer_engine", {"init_info": info})
        )

    def send(self, pairs: Pairs, version: int) -> None:
        """Send all weights, under Hugging Face names; `/weight_info` then reports their version."""
        self._call("start_weight_update", {})
        pairs = copied(pairs, self._device)
        for bucket in buckets_of(pairs if self._changes is None else self._changes.packed(pairs)):
            info = {
                "names": [name for name, _ in bucket],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            _beside(
                lambda bucket=bucket: self._broadcast(tensor for _, tensor in bucket),
                lambda info=info: self._call("update_weights", {"update_info": info}),
            )
        self._call("finish_weight_update", {"weight_version": str(version)})

    def close(self) -> None:
        """Close the TCP connections, which ends a thread that is sending."""
        for worker in self._workers if self._device.type == "cpu" else ():
            # OSError: the worker may have closed the connection already.
            with contextlib.suppress(OSError):
                worker.shutdown(socket.SHUT_RDWR)
            worker.close()

    def _broadcast(self, tensors: Iterator[Tensor]) -> None:
        if self._device.type == "cpu":
            for tensor in tensors:
                for worker in self._workers:
                    worker.sendall(memoryview(bytes_of(tensor).numpy()))
            return
        use_device(self._device)
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            self._workers.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()


def _beside(ours: Callable[[], T], theirs: Callable[[], Any]) -> T:
    """Run both functions concurrently; return the result of `ours`, or raise the first exception."""
    futures = [run_beside(ours), run_beside(theirs)]
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return futures[0].result()
