"""An H100 that inductor and Triton compile for, on a machine without one.

    load_device(); patch_cuda()      # of torchtitan.estimate.device, before torch is imported
    patch_kernels()                  # of torchtitan.estimate.rehearsal
    target = patch_compiler()

Inductor then writes the kernels that it would write on the card, Triton compiles each of them, and
triton's own ptxas assembles it for sm_90. `target` has the results. A kernel that is called does
nothing: tensors "on cuda" are fake.
"""

import dataclasses
import importlib.metadata
import importlib.util
import re
import subprocess
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

from torchtitan.estimate import device
from torchtitan.tools.torch_versions import TESTED

SHARED_MEMORY = 227 * 1024  # bytes that a block of threads can have on an H100
_allocates_on = "cuda"


def why_not() -> str | None:
    """Return why this machine cannot lower kernels, or None if it can."""
    if (reason := device.why_not()) is not None:
        return reason
    torch = importlib.metadata.version("torch").split("+")[0]
    fitting = TESTED.get(torch)
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed; pip install triton=={fitting}"
    if (version := importlib.metadata.version("triton")) != fitting:
        return f"triton {version} is not torch {torch}'s, which is {fitting}"
    return None


@dataclasses.dataclass
class Binary:
    """A kernel in one configuration. stack: bytes of local memory that a thread's spills take."""

    stack: int = 0
    shared: int = 0
    error: str = ""


class Kernel:
    """Takes the place of inductor's launcher."""

    def __init__(self, name: str, source: str, launcher: Any):
        self.name, self.source, self.launcher = name, source, launcher
        self.binaries: list[Binary] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        if not any(getattr(argument, "is_cuda", False) for argument in args):
            self.launcher.run(*args, **kwargs)  # by the interpreter, on numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launcher, name)


@dataclasses.dataclass
class Target:
    """graphs: what each compiled graph launches, in words, in the order of compilation."""

    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    graphs: list[str] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        self.kernels.clear()
        self.graphs.clear()


def patch_compiler(compiles: bool = True) -> Target:
    """For the whole process. compiles: make binaries, too."""
    import torch
    import triton.runtime
    from torch._inductor import async_compile, codecache, config, graph, select_algorithm
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_impls import register_op_impl

    target = Target()
    _patch_device(torch)
    triton.runtime.driver.set_active(_driver())
    triton_helpers.set_driver_to_gpu = triton_helpers.set_driver_to_cpu = lambda: None
    config.compile_threads = 1
    config.joint_graph_constant_folding = False  # it looks at values
    config.force_disable_caches = True
    # Generated code calls this form, of which torch has no function for fake tensors.
    register_op_impl(torch.ops.aten._scaled_mm.out)(lambda *_args, out, **_kwargs: out)

    def make(_compiler: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        launcher = async_compile._load_triton_kernel_from_source(name, source)
        kernel = Kernel(name, source, launcher)
        if compiles:
            kernel.binaries = [_assemble(launcher, config) for config in launcher.configs]
        target.kernels.append(kernel)
        return kernel

    def time_choices(_selector: Any, choices: list, *_args: Any, **_kwargs: Any) -> dict:
        return {choice: _time(choice) for choice in choices}

    async_compile.AsyncCompile.triton = make
    select_algorithm.AlgorithmSelectorCache.make_precompile_fn = lambda *_args, **_kwargs: list
    select_algorithm.AlgorithmSelectorCache.benchmark = time_choices
    graph.GraphLowering.save_output_code = staticmethod(
        lambda code: target.graphs.append(launches(code, codecache.V.graph.is_backward))
    )
    return target


def launches(code: str, is_backward: bool = False) -> str:
    """Return what the code of a graph launches: "forward: 7 mm, 7 triton".

    Products whose result is not in bf16 are named with its dtype.
    """
    body = code.rpartition("def call(self")[2] or code.rpartition("def call(")[2]
    found: Counter[str] = Counter()
    dtypes: dict[str, str] = {}  # of buffers
    for line in body.splitlines():
        if made := re.match(r"\s*(buf\d+) = empty_strided_cuda\(.*torch\.(\w+)\)", line):
            dtypes[made[1]] = made[2]
        elif made := re.match(r"\s*(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)\b", line):
            dtypes[made[1]] = dtypes.get(made[2], "bfloat16")
        for name in re.findall(r"(?:extern_kernels|torch\.ops\.\w+|aten)\.(\w+)[.\w]*\(", line):
            out = re.search(r"out=(?:reinterpret_tensor\()?(buf\d+)", line)
            dtype = dtypes.get(out[1], "bfloat16") if out else "bfloat16"
            found[name if dtype == "bfloat16" else f"{name} in {dtype}"] += 1
        found["triton"] += len(re.findall(r"\.run\(", line))
    names = [f"{count} {name}" for name, count in sorted(found.items()) if count]
    return f"{'backward' if is_backward else 'forward'}: {', '.join(names)}"


def _assemble(launcher: Any, config: Any) -> Binary:
    import triton
    from torch._inductor.runtime.triton_heuristics import ASTSource

    binary = Binary()
    meta = launcher._create_compile_meta(config)
    source = ASTSource(launcher.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = launcher._create_compile_options(config, meta)
    try:
        compiled = triton.compile(source, target=_gpu_target(), options=options)
    except Exception as error:
        binary.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return binary
    binary.shared = compiled.metadata.shared
    if binary.shared > SHARED_MEMORY:
        binary.error = f"{binary.shared} bytes of shared memory; a block can have {SHARED_MEMORY}"
    _, binary.stack = _usage(compiled.asm["cubin"])
    return binary


def _time(choice: Any) -> float:
    """Stands for the time that autotuning measures: a kernel that spills is slower."""
    from torch._inductor.codecache import PyCodeCache

    request = choice.bmreq
    module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
    launcher = getattr(module, request.kernel_name)
    (binary,) = (_assemble(launcher, config) for config in launcher.configs)
    return float("inf") if binary.error else 1.0 + binary.stack


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack) of a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return int(found[1]), int(found[2])


def _gpu_target() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


def _driver() -> Any:
    import torch

    limits = {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132}
    return types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda _: limits | {"warpSize": 32}),
        get_current_target=_gpu_target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
        map_python_to_cpp_type=lambda _: "int",
        launcher_cls=None,
    )


def _patch_device(torch: types.ModuleType) -> None:
    """What compiled code takes from torch's C++ library, and a CPU build of it lacks."""
    from torch._dynamo import device_interface

    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    torch._C._cuda_getDevice = lambda: 0
    torch.cuda._set_stream_by_id = lambda *_args, **_kwargs: None
    torch.cuda._exchange_device = lambda _: 0  # not one object: the compiler has a handler for each
    torch.cuda._maybe_exchange_device = lambda _: 0
    device_interface.CudaInterface.get_raw_stream = staticmethod(lambda _: 0)
    device_interface.get_cuda_stream = lambda _: 0
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=_allocates_on
    )
    guards._reinterpret_tensor = lambda x, size, stride, offset=0: torch.as_strided(
        x, size, stride, x.storage_offset() + offset
    )
    guards.assert_size_stride = guards.assert_alignment = lambda *_args, **_kwargs: None


def allocate_on(device: str) -> None:
    """Compiled code makes its results there from now on."""
    global _allocates_on
    _allocates_on = device


def let_interpreter_compute() -> None:
    """Functions that the interpreter of triton 3.7.1 lacks; TRITON_INTERPRET has to be 1."""
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers

    for name in ("rsqrt", "sqrt", "exp", "exp2", "log", "log2", "sin", "cos"):
        # Looked up at each call, as the interpreter puts its own functions there meanwhile.
        setattr(triton_helpers.libdevice, name, lambda x, name=name: getattr(tl.math, name)(x))
