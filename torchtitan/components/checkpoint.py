"""The import path in torchtitan 0.2.x of `torchtitan.checkpoint`."""
# ruff: noqa: F401

import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from torchtitan.checkpoint import dcp, saver
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.retention import SaveDone, Terminate, purge_thread
from torchtitan.checkpoint.saver import AsyncMode
from torchtitan.checkpoint.states import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    ModelWrapper,
)

# Looked up at each call, because clients written for 0.2.x replace `DefaultStager` in this module.
saver.make_stager = lambda options: DefaultStager(options)
