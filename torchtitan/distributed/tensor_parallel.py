"""Tensor parallelism: every weight matrix is split over the ranks of one mesh.

Parameters become DTensors on the mesh. Activations stay plain tensors: each module computes with
this rank's part of its parameters, and `sequence_parallel` moves hidden states between modules. In
a block of a decoder (B rows, T tokens, t = T / tp tokens on this rank, M model dim):

    attention_norm, ffn_norm    [B, t, M]                            parameters whole
    gather                      [B, t, M] -> [B, T, M]
    wq, wk, wv, w1, w3          [B, T, M] -> this rank's heads, hidden units
                                                                     split by rows (columns of W^T)
    wo, w2                      -> one summand of [B, T, M]          split by columns
    reduce                      -> [B, t, M]

The gradient of a parameter that every rank holds whole is always summed over ranks. A value that
every rank computes from all tokens (an auxiliary loss) must be divided by the number of ranks.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan import distributed
from torchtitan.config import JobConfig
from torchtitan.config.checks.layout import async_tensor_parallel
from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.sequence_parallel import SequenceShards, join_shards
from torchtitan.numerics import nf4
from torchtitan.numerics.linear import Linear, project
from torchtitan.numerics.norm import RMSNorm
from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger

Row = Mapping[str, int | None]
"""A module's parameters: name -> the dimension to split, or None to keep the parameter whole."""

_DEGREE_OF_AXIS = {
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}


def split_parameter(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh, dims: Sequence[int | None]
) -> nn.Parameter:
    """Return this rank's share of a parameter, split along `dims[i]` over axis i of the mesh.

    Raises ValueError, naming `name`, if the size of axis i does not divide the dimension.
    """
    sizes = list(parameter.shape)
    # A 4-bit weight consists of blocks, which are not split.
    if parameter.dtype == torch.uint8:
        sizes[-1] //= nf4.BYTES
    for axis, dim in enumerate(dims):
        if dim is not None and sizes[dim] % mesh.size(axis):
            axis_name = (mesh.mesh_dim_names or ("ep", "etp"))[axis]
            degree = _DEGREE_OF_AXIS.get(axis_name, f"the size of mesh axis {axis_name!r}")
            raise ValueError(
                f"{degree} must divide dimension {dim} of {name}, got "
                f"{mesh.size(axis)} with shape {sizes}"
                f"{f' (blocks of {nf4.BLOCK} numbers in 4 bits)' * (sizes != [*parameter.shape])}"
                f"; choose a divisor of {sizes[dim]}"
            )
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    share = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    return nn.Parameter(share, requires_grad=parameter.requires_grad)


def distribute_modules(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Row],
    loss_parallel: bool,
    overlap: bool = False,
    float8_gather: bool = False,
) -> None:
    """Split the model's parameters over a 1-D mesh, in place, by the rows of `plan`; see `apply_tp`.

    plan: module name (`*` stands for a layer's number) -> row; rows without a module are ignored. A
        module's own `tensor_parallel_row` takes precedence.

    Parameters that are DTensors already are unchanged. Other parameters, if not on the meta device,
    must have the same values on every rank. Modules that share a parameter still share it afterwards.

    Raises ValueError for parameters without a row, a size that the mesh doesn't divide, and a class
    that cannot compute with a part of its parameters (such as a float8 output projection).
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        parameters = {
            key: parameter
            for key, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, DTensor)  # experts are split already
        }
        if not parameters:
            continue
        row = _find_row(plan, name, module, parameters)
        for parameter_name, parameter in parameters.items():
            if parameter not in replaced:
                dims = [row[parameter_name]]
                replaced[parameter] = split_parameter(
                    f"{name}.{parameter_name}", parameter, mesh, dims
                )
            module.register_parameter(parameter_name, replaced[parameter])
        _compute_locally(name, module)
    if model.output is not None:
        model.output.__class__ = VocabularyOutput
        model.output.keeps_shards = loss_parallel
    model.sequence = SequenceShards(mesh, overlap)
    for block in model.layers.values():
        block.sequence = model.sequence
    logger.info("tensor parallelism on %d ranks, loss parallel: %s", mesh.size(), loss_parallel)
    if float8_gather:
        shards_of = {x: distributed.float8_shards_for(x, mesh) for x in model.layers.values()}
        in_float8 = {block: shards for block, shards in shards_of.items() if shards is not None}
        for block, shards in in_float8.items():
            block.sequence = shards
        logger.info("%d of %d blocks gather in float8", len(in_float8), len(model.layers))


def _find_row(
    plan: Mapping[str, Row], name: str, module: nn.Module, parameters: Mapping[str, Any]
) -> Row:
    found = (plan[pattern] for pattern in plan if fnmatchcase(name, pattern))
    row = getattr(module, "tensor_parallel_row", None) or next(found, {})
    if missing := [key for key in parameters if key not in row]:
        raise ValueError(
            f"the tensor-parallel plan must say how to split {', '.join(missing)} of {name!r}, a "
            f"{type(module).__name__}; its row has {', '.join(row) or 'no entries'}; add the missing entries"
        )
    return row


def _compute_locally(name: str, module: nn.Module) -> None:
    """Make the module's forward read this rank's part of its parameters, by changing its class.

    A wrapper would change parameter names, and a new forward per module could not share compiled code.
    """
    if getattr(module, "reads_local_parameters", False):
        return
    # Importing torchao takes seconds; if it is not imported yet, no Float8Linear exists.
    torchao = sys.modules.get("torchao.float8.float8_linear")
    if type(module) in (nn.Linear, Linear):
        module.__class__ = LocalLinear
    elif type(module) in (nn.RMSNorm, RMSNorm):
        module.__class__ = LocalRMSNorm
    elif type(module) is nn.Embedding:
        module.__class__ = VocabularyEmbedding
    elif torchao is None or type(module) is not torchao.Float8Linear:
        raise ValueError(
            f"tensor parallelism cannot split {name!r}, a {type(module).__name__}: make its forward "
            "read parameters through local_parameter(), and set reads_local_parameters = True in its "
            "class; or set parallelism.tensor_parallel_degree = 1"
        )
    elif name == "output":
        raise ValueError(
            "tensor parallelism splits the output projection in high precision only; add 'output' "
            "to quantize.linear.float8.filter_fqns"
        )
    else:
        module.__class__ = distributed.LocalFloat8Linear


# ---- modules that compute with this rank's part of their parameters ----


class LocalRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, local_parameter(self.weight))


class LocalLinear(Linear):
    """A Linear that computes with this rank's part of its parameters.

    If the weight is split by columns, the result is a partial sum, which includes 1/tp of the bias.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = local_parameter(self.bias, added_once=self.weight.placements == (Shard(1),))
        return self.compute(x, local_parameter(self.weight), bias)


class VocabularyEmbedding(nn.Embedding):
    """An embedding whose rows are split over ranks. [B, T] -> this rank's summand of [B, T, M]."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_parameter(self.weight)
        own = tokens - self.weight.device_mesh.get_local_rank() * weight.shape[0]
        elsewhere = (own < 0) | (own >= weight.shape[0])
        rows = F.embedding(own.masked_fill(elsewhere, 0), weight)
        return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


class VocabularyOutput(nn.Linear):
    """An output projection whose vocabulary is split over ranks. [B, T, M] -> logits [B, T, V].

    keeps_shards: return a DTensor split along the vocabulary, instead of a plain tensor of all logits.
    If `forward` gets a `head`, a function of hidden states and output weights such as `TokenLogProbs`, it
    returns head(hidden states, this rank's weight, this rank's bias, group=...) in place of logits.
    """

    keeps_shards: bool = True
    in_fp32: bool = False
    cap: float | None = None
    low_rank: Callable[..., Any] | None = None

    def forward(self, h: Tensor, head: Callable[..., Any] | None = None) -> Any:
        mesh = self.weight.device_mesh
        weight, bias = local_parameter(self.weight), local_parameter(self.bias)
        low_rank = None if self.low_rank is None else functools.partial(self.low_rank, self)
        if head is not None:
            head = functools.partial(head, group=mesh.get_group())
        how = {"in_fp32": self.in_fp32, "low_rank": low_rank, "cap": self.cap}
        logits = project(head, h, weight, bias, **how)
        if head is not None:
            return logits
        if self.keeps_shards:
            return DTensor.from_local(logits, mesh, [Shard(logits.ndim - 1)], run_check=False)
        ranks = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
        return join_shards(logits, logits.ndim - 1, self.out_features, *ranks)


# ---- a ParallelStyle for other programs ----


class NoParallel(ParallelStyle):
    """Every rank of the mesh computes the whole module, on parameters that are DTensors.

    input_layout: the layout of the module's first input, if that is a plain tensor.
    output_layout: the layout of the output. use_local_output: return it as a plain local tensor.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        whole = self.desired_input_layout = Replicate()
        self.input_layout, self.output_layout = input_layout or whole, output_layout or whole
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather_first_input(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
            first, *others = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, (self.input_layout,), run_check=False)
            first = first.redistribute(placements=(self.desired_input_layout,), async_op=True)
            return (first, *others)

        def lay_out_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            output = output.redistribute(placements=(self.output_layout,), async_op=True)
            return output.to_local() if self.use_local_output else output

        return distribute_module(
            module, device_mesh, input_fn=gather_first_input, output_fn=lay_out_output
        )


# ---- overlapping communication with matrix products ----


def maybe_enable_async_tp(job_config: JobConfig, tp_mesh: DeviceMesh) -> None:
    """Make the compiler overlap gathers and reductions with matrix products, if the config says so.

    A compiler pass replaces a collective and a matrix product by one operator that sends pieces through
    symmetric memory, so the ranks must be on one node. Raises RuntimeError if blocks are not compiled.
    """
    if not job_config.parallelism.enable_async_tensor_parallel:
        return
    for problem in async_tensor_parallel(job_config):
        raise RuntimeError(problem)
    host.change_attribute(*torch_parts.place("pipelined_products"), True)
    if tp_mesh.device_type != "cuda":
        logger.warning(
            "parallelism.enable_async_tensor_parallel has no effect on %r: its operators need CUDA",
            tp_mesh.device_type,
        )
        return
    if torch.__version__ < "2.15":
        with warnings.catch_warnings():
            # Up to torch 2.14, inductor's pass needs this call for each group; the call is deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            torch_parts.enable_symmetric_memory(tp_mesh.get_group().group_name)
    logger.info("asynchronous tensor parallelism on %d ranks", tp_mesh.size())
