"""Aborting groups on an accelerator, with stand-ins, and on gloo."""

import contextlib
import threading
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torchtitan.distributed.processes.own_groups import abort_groups, making_groups
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools import torch_parts


def test_nccl_groups_are_aborted_together_and_only_those_that_exist_still():
    calls = mock.Mock()
    backends = [mock.Mock(**{"name.return_value": name}) for name in ("nccl", "nccl", "gloo")]
    for number, backend in enumerate(backends):
        calls.attach_mock(backend._group_start, f"start_{number}")
        calls.attach_mock(backend.abort, f"abort_{number}")
        calls.attach_mock(backend._group_end, f"end_{number}")
    _, backend_of = torch_parts.place("backend_of")
    groups = [mock.Mock(**{f"{backend_of}.return_value": backend}) for backend in backends]
    destroyed, on_host = mock.Mock(), mock.Mock(**{f"{backend_of}.side_effect": RuntimeError})
    with (
        mock.patch.dict(c10d._world.pg_map, dict.fromkeys([*groups, on_host])),
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")),
    ):
        abort_groups([*groups, on_host, destroyed])
    assert [name for name, *_ in calls.mock_calls] == ["start_0", "abort_0", "abort_1", "end_0"]
    getattr(destroyed, backend_of).assert_not_called()


def abort_of_a_collective_in_progress():
    """Return on rank 0 whether it fails after gloo's own abort, and after `abort_groups`."""
    with making_groups():
        group = dist.new_group()
    dist.barrier(group)
    failed = threading.Event()

    def wait_for_rank_1() -> None:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        failed.set()

    by_gloo = by_us = None
    if dist.get_rank() == 0:
        threading.Thread(target=wait_for_rank_1, daemon=True).start()
        time.sleep(0.1)
        group._get_backend(torch.device("cpu")).abort()
        by_gloo = failed.wait(1)
    dist.barrier()
    abort_groups([group])  # on both ranks, as the watch does: one of them accepted the connection
    if dist.get_rank() == 0:
        by_us = failed.wait(5)
    dist.barrier()
    return by_gloo, by_us


def test_gloo_cannot_abort_a_collective_so_that_its_connections_are_shut_down():
    """Once gloo can, the walk through the process's sockets can go."""
    assert run_ranks(abort_of_a_collective_in_progress, 2)[0] == (False, True)
