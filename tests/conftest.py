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


def destroy_what_begins_here():
    was_initialized = torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized() and not was_initialized:
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def process_group_of_module_as_it_was():
    """As below, for engines that fixtures of a whole file build before its first test."""
    yield from destroy_what_begins_here()


@pytest.fixture(autouse=True)
def process_group_as_it_was():
    """An engine makes a process group of one rank where there is none, and keeps it."""
    yield from destroy_what_begins_here()
