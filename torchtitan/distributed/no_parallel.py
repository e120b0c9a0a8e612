"""Modules that every rank of a tensor-parallel mesh computes whole."""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class NoParallel(ParallelStyle):
    """Every rank of the mesh computes the whole module, on parameters that are DTensors.

    For modules too small to split (a router gate, a norm) inside a tensor-parallel block: all
    parameters of the block are then on one mesh.

    input_layout: how the module's first input comes in, when it is a plain tensor.
    output_layout: how the output leaves; as a plain local tensor unless `use_local_output` is off.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layout = input_layout or Replicate()
        self.desired_input_layout = Replicate()
        self.output_layout = output_layout or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=partial(_gather_first_input, self.input_layout, self.desired_input_layout),
            output_fn=partial(_lay_out_output, self.output_layout, self.use_local_output),
        )


def _gather_first_input(given, desired, module, inputs, mesh):
    first, *others = inputs
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, mesh, (given,), run_check=False)
    if first.placements != (desired,):
        first = first.redistribute(placements=(desired,), async_op=True)
    return (first, *others)


def _lay_out_output(desired, use_local_output, module, output, mesh):
    if output.placements != (desired,):
        output = output.redistribute(placements=(desired,), async_op=True)
    return output.to_local() if use_local_output else output
