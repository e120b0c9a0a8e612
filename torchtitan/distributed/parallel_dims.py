"""The degrees of parallelism and the device meshes that follow from them.

The world of ranks is divided into axes in three ways, called cuts, outermost axis first:

    dataloading   pp, batch, cp, tp                  which rank reads which data
    dense         pp, dp_replicate, fsdp, tp         which rank holds which ordinary parameters
    sparse        pp, dp_replicate, efsdp, ep, etp   which rank holds which expert parameters

with batch = dp_replicate * dp_shard, fsdp = dp_shard * cp, efsdp = fsdp * tp / (ep * etp).
The loss is reduced over `loss`, which is batch and cp flattened into one axis.
"""

from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.distributed.processes.own_groups import making_meshes
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_device_type

# The device type of meshes. If None, it is detected when meshes are built. A test or a client may set it.
device_type: str | None = None

_AXES_OF_CUT: dict[str, tuple[str, ...]] = {
    "dataloading": ("pp", "batch", "cp", "tp"),
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "sparse": ("pp", "dp_replicate", "efsdp", "ep", "etp"),
}


def _is_above_one(degree: str) -> property:
    return property(lambda self: getattr(self, degree) > 1)


@dataclass
class ParallelDims:
    """Degrees of parallelism of a world of `world_size` ranks; meshes are built at first use.

    dp_shard = -1 takes all ranks that the other degrees leave. ep and etp reuse ranks of fsdp and tp.
    always_fsdp: let FSDP hold the parameters even if there is nothing to shard.
    Raises AssertionError (which clients of the interface catch) for degrees that don't fit.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    etp: int
    world_size: int
    always_fsdp: bool = False

    _meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)
    _global_meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "cp", "tp", "pp", "ep", "etp"):
            degree = getattr(self, name)
            assert degree >= 1, f"parallel degree {name} must be at least 1, got {degree}"
        assert self.dp_shard == -1 or self.dp_shard >= 1, (
            f"parallel degree dp_shard must be at least 1, or -1 to take all remaining ranks, "
            f"got {self.dp_shard}"
        )
        others = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1:
            self.dp_shard = self.world_size // others
        assert self.dp_shard >= 1 and others * self.dp_shard == self.world_size, (
            f"parallel degrees must multiply to the world size {self.world_size}, got "
            f"dp_replicate({self.dp_replicate}) * dp_shard({self.dp_shard}) * cp({self.cp}) "
            f"* tp({self.tp}) * pp({self.pp}) = {others * self.dp_shard}"
        )
        if self.ep > 1:
            assert self.etp in (1, self.tp), (
                f"expert tensor parallel degree must be 1 or the tensor parallel degree "
                f"({self.tp}), got {self.etp}"
            )

    def build_mesh(self) -> DeviceMesh:
        """Build all meshes; returns the 1-D mesh of all ranks. Collective.

        Raises ValueError if ep * etp does not divide the number of ranks that share dense parameters.
        """
        # Register the fake backend for unused axes; torch has it only among its testing helpers.
        torch_parts.get("fake_backend")

        fsdp, batch = self.dp_shard * self.cp, self.dp_replicate * self.dp_shard
        experts = self.ep * self.etp
        if fsdp * self.tp % experts:
            raise ValueError(
                f"expert parallelism needs dp_shard * cp * tp to be a multiple of ep * etp, got "
                f"{self.dp_shard} * {self.cp} * {self.tp} = {fsdp * self.tp} and "
                f"{self.ep} * {self.etp} = {experts}; change "
                f"parallelism.expert_parallel_degree to a divisor of {fsdp * self.tp // self.etp}"
            )
        sizes = {
            "pp": self.pp,
            "batch": batch,
            "loss": batch * self.cp,
            "dp_replicate": self.dp_replicate,
            "fsdp": fsdp,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
            "efsdp": fsdp * self.tp // experts,
            "etp": self.etp,
        }
        with making_meshes():
            world_mesh = init_device_mesh(
                device_type or get_device_type(), (self.world_size,), mesh_dim_names=("world",)
            )
            cuts: dict[str, DeviceMesh] = {}
            for cut, axes in _AXES_OF_CUT.items():
                # An axis without communication gets torch's fake backend, hence no communicator.
                unused = {name: "fake" for name in axes if not self._axis_exists(name, sizes[name])}
                cut_sizes = tuple(sizes[name] for name in axes)
                cuts[cut] = torch_parts.split_mesh(
                    world_mesh, 0, cut_sizes, axes, backend_override=unused
                )
            loss_mesh = torch_parts.join_mesh(cuts["dataloading"]["batch", "cp"], "loss_mesh")

        self._global_meshes = cuts | {"world": world_mesh}
        # Take each axis from the first cut that has the axis.
        cut_of = {name: cut for cut, axes in reversed(_AXES_OF_CUT.items()) for name in axes}
        self._meshes = {
            name: loss_mesh if name == "loss" else cuts[cut_of[name]][name] for name in sizes
        }
        active = {n: m.size() for n, m in self.get_all_one_dimensional_meshes().items()}
        logger.info("%s, active mesh axes: %s", self, active or "none (one rank)")
        return world_mesh

    def _axis_exists(self, name: str, size: int) -> bool:
        # With ep, experts have their own meshes, even of size 1; without ep, they are on the dense meshes.
        return self.ep > 1 if name == "efsdp" else size > 1

    def get_optional_mesh(self, dims: str | list[str]) -> DeviceMesh | None:
        """Return the mesh of one axis, or of several axes, outermost first; None if an axis is off.

        Raises ValueError for an unknown axis, and for axes that are not all in one cut of the world.
        """
        if not self._meshes:
            self.build_mesh()
        names = [dims] if isinstance(dims, str) else list(dims)
        for name in names:
            if name not in self._meshes:
                raise ValueError(f"Invalid mesh dim: {name!r}; valid are {list(self._meshes)}")
        if not all(self._axis_exists(name, self._meshes[name].size()) for name in names):
            return None
        return self._mesh_of(names)

    def _mesh_of(self, names: list[str]) -> DeviceMesh:
        if len(names) == 1:
            return self._meshes[names[0]]
        for cut, axes in _AXES_OF_CUT.items():
            if set(names) <= set(axes):
                in_order = tuple(axis for axis in axes if axis in names)
                if tuple(names) != in_order:
                    raise ValueError(f"mesh dims must go outermost first: {in_order}, got {names}")
                return self._global_meshes[cut][in_order]
        raise ValueError(
            f"Invalid mesh name combinations: {names} are not axes of one cut of the world; "
            f"the cuts are {_AXES_OF_CUT}"
        )

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        """Like `get_optional_mesh`, but raises ValueError if an axis is off."""
        mesh = self.get_optional_mesh(dims)
        if mesh is None:
            raise ValueError(
                f"there is no mesh for {dims!r}: one of these parallelisms is off (degree 1). "
                f"Degrees: {self}"
            )
        return mesh

    def get_fsdp_mesh(self) -> DeviceMesh:
        """Return the mesh for ordinary parameters: [fsdp], possibly of size 1, or [dp_replicate, fsdp]."""
        if not self._meshes:
            self.build_mesh()
        return self._mesh_of(["dp_replicate", "fsdp"] if self.dp_replicate_enabled else ["fsdp"])

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """Return every axis with more than one rank, by name."""
        if not self._meshes:
            self.build_mesh()
        return {n: m for n, m in self._meshes.items() if m.ndim == 1 and m.size() > 1}

    @property
    def world_mesh(self) -> DeviceMesh:
        """The 1-D mesh of all ranks."""
        return self._global_meshes["world"] if self._meshes else self.build_mesh()

    dp_replicate_enabled = _is_above_one("dp_replicate")
    dp_shard_enabled = _is_above_one("dp_shard")
    cp_enabled = _is_above_one("cp")
    tp_enabled = _is_above_one("tp")
    pp_enabled = _is_above_one("pp")
    ep_enabled = _is_above_one("ep")
    etp_enabled = _is_above_one("etp")

    @property
    def dp_enabled(self) -> bool:
        return self.dp_replicate_enabled or self.dp_shard_enabled

    @property
    def dp_cp_enabled(self) -> bool:
        return self.dp_enabled or self.cp_enabled

    @property
    def fsdp_enabled(self) -> bool:
        return self.dp_shard_enabled or self.cp_enabled

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP holds the parameters: to shard them, or in place of DDP, which can't hold DTensors."""
        replicates_split = self.dp_replicate_enabled and self.tp_enabled
        return self.always_fsdp or self.fsdp_enabled or replicates_split or self.ep_enabled

    @property
    def fsdp_gradient_divide_factor(self) -> int:
        """The number of ranks whose gradients are reduced together."""
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that work on the same samples."""
        return self.cp * self.tp * self.pp

    @property
    def seq_len_divisor(self) -> int:
        """The divisor of row lengths in torchtitan 0.2.x, for clients; we use `sequence_multiple`."""
        return self.tp * (self.cp * 2)
