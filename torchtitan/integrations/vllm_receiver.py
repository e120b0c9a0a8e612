"""The end in vLLM's workers of the lane in `torchtitan.integrations.vllm_lane`; imports vLLM."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from torchtitan.rl.weight_changes import WeightChanges, bytes_of
from torchtitan.rl.weight_transport import gloo_group

_TIMEOUT = timedelta(minutes=10)  # for the trainer's next tensor


class GlooReceiver(NCCLWeightTransferEngine):
    """vLLM's engine for NCCL, whose messages and reloading it keeps, with a lane of gloo."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.master_address, init_info.master_port, timeout=_TIMEOUT)
        self.model_update_group: Any = gloo_group(
            store, init_info.rank_offset + worker, init_info.world_size, _TIMEOUT
        )
        self._changes = WeightChanges()  # of this sender

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator afterwards, which a CPU is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        infos = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in infos
        }
        works = [
            self.model_update_group.broadcast(bytes_of(tensor), 0) for tensor in tensors.values()
        ]
        for work in works:
            work.wait()
        weights = self._changes.unpacked(tensors.items())
        self.model.load_weights((name, x.to(self.device)) for name, x in weights)

    def shutdown(self) -> None:
        self.model_update_group = None
