"""Sends weights to a vLLM server by vLLM's weight-transfer interface, without files.

The server is told over HTTP what comes: `init_weight_transfer_engine` once, then for each update
`start_weight_update`, `update_weights` for some tensors at a time, and `finish_weight_update`. The
tensors go through a process group of the sending rank and the server's workers: with NCCL between
GPUs, received by vLLM's own engine, or with gloo, received by `torchtitan.integrations.vllm_receiver`.
Written for vLLM 0.32.0.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.rl.weight_changes import WeightChanges, bytes_of
from torchtitan.rl.weight_transport import buckets_of, copied, gloo_group
from torchtitan.tools.utils import get_device_type, use_device

T = TypeVar("T")


def register() -> None:
    """Name our receiver "gloo" among vLLM's. vLLM calls this in each of its processes."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # a vLLM without the interface
        return
    # vLLM calls plug-ins again in processes that it forks.
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "gloo", "torchtitan.integrations.vllm_receiver", "GlooReceiver"
        )


class WeightLane:
    """The way of one rank's weights to the workers of one vLLM server.

    backend: as the server's `--weight-transfer-config '{"backend": ...}'`.
    call: posts a message to an endpoint of the server, given its name, and returns the answer; gets
        where the message is None. It raises if the server refuses.
    url: the server's; the lane listens at the address of this machine that reaches it.
    delta: send only what changed since the last update; for "gloo".

    Raises what `call` raises. After that the lane cannot be used again.
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
        timeout = timedelta(seconds=timeout_seconds)
        if backend == "gloo":
            store = dist.TCPStore(
                address, 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
            port = store.port
            self._device = torch.device("cpu")
        else:
            with socket.socket() as probe:
                probe.bind((address, 0))
                port = probe.getsockname()[1]
            self._device = torch.device(get_device_type(), torch.accelerator.current_device_index())
        info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,  # this rank is 0
            "world_size": size,
            "packed": False,  # tensors are sent one by one
        }

        def join() -> Any:
            if backend == "gloo":
                return gloo_group(store, 0, size, timeout)
            from vllm.distributed.weight_transfer import nccl_common

            use_device(self._device)
            return nccl_common.trainer_init(info)

        self._group = _beside(
            join, lambda: call("init_weight_transfer_engine", {"init_info": info})
        )

    def send(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all weights, under Hugging Face names; `/weight_info` then tells their version."""
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

    def _broadcast(self, tensors: Iterator[Tensor]) -> None:
        if self._device.type == "cpu":
            for work in [self._group.broadcast(bytes_of(tensor), 0) for tensor in tensors]:
                work.wait()
            return
        use_device(self._device)
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            self._group.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()


def _beside(ours: Callable[[], T], theirs: Callable[[], Any]) -> T:
    """Run both at once; return the result of `ours`.

    If one raises, that is raised at once: the other waits for a peer that is gone, on a thread
    which does not keep the process from ending.
    """
    futures: list[Future] = [Future(), Future()]

    def run(function: Callable[[], Any], future: Future) -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    for function, future in zip((ours, theirs), futures, strict=True):
        threading.Thread(target=run, args=(function, future), daemon=True).start()
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return futures[0].result()
