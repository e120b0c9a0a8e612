"""Joining, reusing and refusing process groups; contexts and reductions on them."""

import contextlib
import logging
import os
import re
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import torchtitan.distributed.utils as dist_utils
from tests.distributed import parallel_dims
from torchtitan.config.job_config import Comm
from torchtitan.distributed.processes import process_group
from torchtitan.testing.gloo import RankFailure, run_ranks


def refusal_of(call, *arguments, **options):
    """Return the message of the ValueError, or what the call returns."""
    try:
        return call(*arguments, **options)
    except ValueError as error:
        return str(error)


def on_device(device_type):
    info = device_type, torch.get_device_module(device_type)
    return patch.object(process_group, "get_device_info", return_value=info)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_traces_of_nccl_have_a_folder_if_there_is_a_place_for_one(backend, caplog, tmp_path):
    with patch.dict(os.environ):
        os.environ.pop("TORCH_FR_DUMP_TEMP_FILE", None)
        (tmp_path / "file").touch()
        process_group._configure_flight_recorder(Comm(), str(tmp_path / "file"), backend)
        assert "a hang will leave no traces" in caplog.text
        assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
        process_group._configure_flight_recorder(Comm(), str(tmp_path), backend)
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(tmp_path / "comm_traces"))
        assert (tmp_path / "comm_traces").is_dir()


def device_id_of_init(device_type, world_size, local_rank):
    """Return the arguments of `init_process_group`, and the default group's device for later groups."""
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ.pop("LOCAL_RANK")
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = local_rank
    told = []

    def init(*, backend, device_id, _ranks, store, **kwargs):
        told.append((backend, device_id))
        init_process_group("fake", **kwargs)
        dist.group.WORLD.bound_device_id = device_id  # as torch does

    init_process_group = dist.init_process_group
    meeting = {"store": None, "rank": 0, "world_size": world_size}
    with (
        on_device(device_type),
        patch.object(process_group, "_rendezvous", return_value=meeting),
        patch.object(dist, "init_process_group", init),
    ):
        dist_utils.init_distributed(Comm(trace_buf_size=0), enable_cpu_backend=True)
    assert dist.group.WORLD.bound_device_id is None, "every later group would be split from it"
    return told[0]


@pytest.mark.parametrize(
    "device_type, world_size, local_rank, expected",
    [
        ("cuda", 2, "1", ("cuda:nccl,cpu:gloo", torch.device("cuda:1"))),
        ("cuda", 2, None, ("cuda:nccl,cpu:gloo", None)),
        ("cuda", 1, "0", ("cuda:nccl,cpu:gloo", None)),
        ("cpu", 2, "1", ("gloo", None)),
    ],
)
def test_ranks_of_accelerators_are_connected_at_once(device_type, world_size, local_rank, expected):
    told = run_ranks(
        device_id_of_init, 1, device_type, world_size, local_rank, init_process_group=False
    )
    assert told == [expected]


def init_over_existing_group(folder):
    group = dist.group.WORLD
    with patch.object(process_group.logger, "warning") as warning:
        size = dist_utils.init_distributed(Comm(init_timeout_seconds=1), base_folder=folder)
    messages = [call.args[0] for call in warning.call_args_list]
    return size, group is dist.group.WORLD, messages


def test_existing_group_is_reused_with_a_warning(tmp_path):
    for size, same, messages in run_ranks(init_over_existing_group, 2, str(tmp_path)):
        assert size == 2 and same
        (message,) = messages
        assert "existing process group is reused" in message
        for key in ("mode", "init_timeout_seconds", "train_timeout_seconds", "trace_buf_size"):
            assert f"comm.{key}" in message
        assert "ranks have no effect on this group" in message


def refusal_on(device_type, backend, enable_cpu_backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with on_device(device_type):
        return refusal_of(dist_utils.init_distributed, Comm(trace_buf_size=0), enable_cpu_backend)


@pytest.mark.parametrize(
    "device_type, backend, cpu_too, wanted",
    [
        ("cuda", "gloo", False, "cuda tensors.*'nccl'"),
        ("cuda", "cpu:gloo", False, "cuda tensors.*'nccl'"),
        ("cpu", "cuda:gloo", False, "cpu tensors.*'gloo'"),
        ("cuda", "cuda:fake", True, "cpu tensors.*'cuda:nccl,cpu:gloo'"),
    ],
)
def test_existing_group_that_cannot_serve_the_device_is_refused(
    device_type, backend, cpu_too, wanted
):
    (message,) = run_ranks(refusal_on, 1, device_type, backend, cpu_too, init_process_group=False)
    assert re.search(wanted, message), message


def fake_world(ngpu):
    os.environ.pop("NGPU", None)
    if ngpu is not None:
        os.environ["NGPU"] = ngpu
    return refusal_of(dist_utils.init_distributed, Comm(mode="fake_backend"))


def test_fake_mode_takes_its_world_size_from_ngpu():
    assert run_ranks(fake_world, 1, "8", init_process_group=False) == [8]
    for wrong in (None, "two", "0"):
        (message,) = run_ranks(fake_world, 1, wrong, init_process_group=False)
        assert "NGPU" in message and repr(wrong or "") in message


def reduce_and_set_timeouts():
    rank = dist.get_rank()
    d = parallel_dims(dp_shard=2)
    mesh = d.get_mesh("batch")
    dist_utils.set_pg_timeouts(timedelta(seconds=7), d)
    x = torch.tensor(float(rank + 1))
    return (
        dist_utils.dist_max(x, mesh),
        dist_utils.dist_sum(x, mesh),
        dist_utils.dist_mean(x, mesh),
        dist_utils.dist_sum(x, mesh, extra_pg=dist.group.WORLD),
        dist_utils.dist_sum(torch.tensor([rank + 1]), mesh),
        dist_utils.dist_sum(x),
        mesh.get_group()._get_backend(torch.device("cpu")).options._timeout,
    )


def test_reductions_over_a_mesh_give_python_numbers():
    first, second = run_ranks(reduce_and_set_timeouts, 2)
    assert first[:5] == second[:5] == (2.0, 3.0, 1.5, 6.0, 3)
    assert isinstance(first[4], int)
    assert (first[5], second[5]) == (1.0, 2.0)  # without a mesh: this rank's own
    assert first[6] == timedelta(seconds=7)


def clip_over_pipeline(norm_type):
    torch.manual_seed(dist.get_rank())
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    if dist.get_rank() == 0:
        parameters[1].grad = torch.randn(4)
    else:
        parameters[0].grad = torch.randn(3)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    pp_mesh = parallel_dims(pp=2).get_mesh("pp")
    norm = dist_utils.clip_grad_norm_(parameters, 0.5, norm_type=norm_type, pp_mesh=pp_mesh)
    return norm, before, [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_norm_over_pipeline_stages_is_that_of_all_their_gradients(norm_type):
    results = run_ranks(clip_over_pipeline, 2, norm_type)
    everything = torch.cat([grad for _, before, _ in results for grad in before])
    expected = torch.linalg.vector_norm(everything, norm_type)
    for norm, before, after in results:
        torch.testing.assert_close(norm, expected)
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old * 0.5 / (expected + 1e-6))


def distributed_parameter(grad, mesh, *placements):
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements))
    parameter.grad = distribute_tensor(grad, mesh, placements)
    return parameter


def test_plain_parameter_beside_experts_is_refused():
    plain = nn.Parameter(torch.zeros(1))
    plain.grad = torch.ones(1)
    with pytest.raises(AssertionError, match="every parameter is a DTensor"):
        dist_utils.clip_grad_norm_([plain], 0.5, ep_enabled=True)


def reductions_of_clipping():
    """Count reductions for three gradients split over two axes and two split over one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    over_tp = [Shard(1)] * 3 + [Replicate()] * 2
    parameters = [distributed_parameter(torch.ones(4, 4), mesh, Shard(0), x) for x in over_tp]
    with CommDebugMode() as counter:
        norm = dist_utils.clip_grad_norm_(parameters, 0.5, foreach=True)
    return norm.item(), counter.get_total_counts()


def test_clipping_reduces_once_per_axis_of_gradients_that_are_split_alike():
    for norm, num_reductions in run_ranks(reductions_of_clipping, 4):
        assert norm == pytest.approx((5 * 16) ** 0.5)
        assert num_reductions == 2 + 1  # the sets of axes: fsdp and tp, fsdp


def norm_of_large_gradient():
    mesh = parallel_dims(dp_shard=2).get_mesh("fsdp")
    whole = torch.randn(4001, 1000, generator=torch.Generator().manual_seed(0))
    plain = nn.Parameter(torch.zeros_like(whole))
    plain.grad = whole
    parameters = [plain, *(distributed_parameter(whole, mesh, Shard(dim)) for dim in (0, 1))]
    norms = [dist_utils.clip_grad_norm_([p], 1e9, foreach=True).item() for p in parameters]
    return norms, whole.double().norm().item()


def test_norm_of_a_large_gradient_is_exact_however_it_is_sharded():
    """Torch's own kernel has an error of 1e-4 here, which differs between layouts."""
    for norms, exact in run_ranks(norm_of_large_gradient, 2):
        assert norms == pytest.approx([exact] * 3, rel=1e-6)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nonfinite_norm_raises_only_if_asked(value):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([float(value), 1.0])
    with pytest.raises(RuntimeError, match=f"gradients is {value}"):
        dist_utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert str(dist_utils.clip_grad_norm_([parameter], 1.0).item()) == value


# ---- contexts ----


def test_no_autocast_under_fsdp_or_in_float32():
    x = torch.ones(2, 2)
    for d, dtype in ((parallel_dims(dp_shard=2), "bfloat16"), (parallel_dims(), "float32")):
        with dist_utils.maybe_enable_amp(d, dtype, "cpu"):
            assert (x @ x).dtype == torch.float32


def test_tensor_parallel_without_fsdp_warns_that_bf16_has_no_effect(caplog):
    with caplog.at_level(logging.WARNING, logger="torchtitan"):
        context = dist_utils.maybe_enable_amp(parallel_dims(tp=2), "bfloat16", "cpu")
    assert isinstance(context, contextlib.nullcontext)
    assert "no effect" in caplog.text


# ---- the helper that all of the above stands on ----


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("what was missing")
    dist.barrier()


def test_failing_rank_is_named_with_its_traceback():
    with pytest.raises(RankFailure, match="(?s)rank 1 failed first.*fail_on_rank_1") as caught:
        run_ranks(fail_on_rank_1, 2)
    assert isinstance(caught.value.__cause__, KeyError)
