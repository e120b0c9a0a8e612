"""The receiving end of `vllm_lane`, in vLLM's workers; imports vLLM."""

import socket
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from torchtitan.integrations.vllm_lane import join, receive
from torchtitan.rl.weight_transport import WeightChanges

# Timeout of the wait for the next tensor.
_SECONDS_TO_SEND = 600


@dataclass(kw_only=True)
class LaneInfo(NCCLWeightTransferInitInfo):
    token: str = ""


class GlooReceiver(NCCLWeightTransferEngine):
    """vLLM's NCCL engine, with the same messages and reloading, except that tensors come over TCP."""

    init_info_cls = LaneInfo
    _connection: socket.socket | None = None

    def init_transfer_engine(self, init_info: LaneInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._connection = join(init_info, worker, _SECONDS_TO_SEND)
        # A new sender first sends whole weights.
        self._changes = WeightChanges()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's method also waits for an accelerator, which a CPU worker lacks.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        infos = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in infos
        }
        receive(self._connection, tensors.values())
        weights = self._changes.unpacked(tensors.items())
        self.model.load_weights((name, x.to(self.device)) for name, x in weights)

    def shutdown(self) -> None:
        if self._connection is not None:
            self._connection.close()
