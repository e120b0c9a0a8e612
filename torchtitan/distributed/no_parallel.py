"""A parallel style for modules that every rank of a tensor-parallel mesh computes whole."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class NoParallel(ParallelStyle):
    """Every rank of the mesh computes the whole module, on parameters that are DTensors.

    For modules that are too small to split, such as a router gate or a norm in a tensor-parallel
    block. It puts all parameters of the block on one mesh.

    input_layout: the layout of the module's first input, if that is a plain tensor.
    output_layout: the layout of the output, which is returned as a plain local tensor unless
        `use_local_output` is False.
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
        def redistributed(x: DTensor, layout: Placement) -> DTensor:
            if x.placements == (layout,):
                return x
            return x.redistribute(placements=(layout,), async_op=True)

        def gather_first_input(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
            first, *others = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, (self.input_layout,), run_check=False)
            return (redistributed(first, self.desired_input_layout), *others)

        def lay_out_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            output = redistributed(output, self.output_layout)
            return output.to_local() if self.use_local_output else output

        return distribute_module(
            module, device_mesh, input_fn=gather_first_input, output_fn=lay_out_output
        )
