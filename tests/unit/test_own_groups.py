"""Aborting groups on an accelerator, with stand-ins; tests/reliability aborts gloo groups."""

from unittest import mock

import torch
import torch.distributed.distributed_c10d as c10d

from torchtitan.distributed.processes.own_groups import abort_groups
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
