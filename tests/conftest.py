"""What every test file shares."""

import pytest
import torch

from torchtitan.tools.logging import logger


@pytest.fixture(autouse=True)
def logger_as_it_was():
    """`main()` puts a handler on our logger and stops propagation; later tests read caplog."""
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(autouse=True)
def process_group_as_it_was():
    """An engine makes a process group of one rank where there is none, and keeps it."""
    was_initialized = torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized() and not was_initialized:
        torch.distributed.destroy_process_group()
