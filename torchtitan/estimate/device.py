"""A CUDA device that computes nothing, for a torch that was built without CUDA.

    from torchtitan.estimate.device import load_device
    load_device()          # before the first `import torch` of the process
    import torch
    patch_cuda()

Autograd, FSDP, the compiler's front end and pinned memory then take the same branches as on CUDA.
Tensors on "cuda" must be fake tensors, see `rehearsal.py`. Streams and events keep vector clocks, so
that a missing wait can be found. A call that makes the host wait is reported to `on_host_wait`.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.tools.files import read_text

# Autograd needs a device guard. This guard has one device with one stream, which is always idle. The pinned
# allocator records its blocks, so `Tensor.is_pinned()` is right in every thread.
_SOURCE = r"""
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {
std::mutex mutex;
std::map<const char*, size_t> blocks;  // start and size of each pinned block

void unpin(void* block) {
  std::lock_guard<std::mutex> lock(mutex);
  blocks.erase(static_cast<const char*>(block));
  std::free(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, 64, size ? size : 1) == 0, "out of memory");
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<const char*>(block)] = size;
    return {block, block, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};
PinnedAllocator pinned;
}  // namespace

namespace c10::impl {
struct RehearsalGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
};
C10_REGISTER_GUARD_IMPL(CUDA, RehearsalGuard)
}  // namespace c10::impl

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // torch looks for this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return detail::getDefaultCPUGenerator();
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    if (after == blocks.begin()) return false;
    const auto& [start, size] = *--after;
    return static_cast<const char*>(data) < start + size;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
"""


def why_not() -> str | None:
    """Return why this machine cannot load the stand-in device; None if it can."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    if sys.platform != "linux":
        return f"it is a Linux library, and this is {sys.platform}"
    if (Path(torch.origin).parent / "lib/libtorch_cuda.so").exists():
        return "this torch was built with CUDA; the stand-in needs a CPU build"
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++)"
    return None


def prepare_device() -> None:
    """Provide this machine's GPU, or the stand-in, as the CUDA device. Call it before importing torch."""
    reason = why_not()
    if reason is None:
        load_device()
        patch_cuda()
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"this machine has no GPU, and the stand-in for one cannot be loaded: {reason}; "
            "install torch's CPU build and g++ on Linux, or run this on a machine with a GPU"
        )


def load_device() -> None:
    """Compile the stand-in (2 s, once per torch version) and load it.

    Call it before importing torch, which looks for CUDA only during its import.
    """
    if "torch" in sys.modules:
        raise RuntimeError("load_device() has to come before the first `import torch`")
    root = Path(importlib.util.find_spec("torch").origin).parent
    digest = hashlib.sha1((_SOURCE + read_text(root / "version.py")).encode()).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"cuda_rehearsal_{os.getuid()}_{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / library.name
            command = f"g++ -O0 -std=c++20 -shared -fPIC -x c++ -I{root}/include -L{root}/lib"
            command = [*command.split(), "-o", str(made), "-", "-lc10", "-ltorch_cpu"]
            subprocess.run(command, input=_SOURCE.encode(), check=True)
            # Rename atomically, because several test processes may build at the same time.
            shutil.copy(made, f"{library}.{os.getpid()}")
            os.replace(f"{library}.{os.getpid()}", library)
    for path in (root / "lib/libc10.so", root / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


# ---- streams and events ----

Clock = Counter
"""A vector clock: stream id -> number of operations of the stream that are known to be finished."""

_numbers = itertools.count(1)
_current = threading.local()


def on_host_wait(what: str) -> None:
    """Hook for waits of the host for a stream, an event or the device; `Rehearsal` replaces it."""


host = types.SimpleNamespace(clock=Clock())
"""clock: operations that the host knows to be finished; all threads share it."""


class Event:
    """A point in a stream. clock: the operations that finish before this point."""

    def __init__(self, *_args, **_kwargs) -> None:
        self.clock = Clock()

    def record(self, stream: Any = None) -> None:
        self.clock = Clock((stream or current_stream()).clock)

    def wait(self, stream: Any = None) -> None:
        (stream or current_stream()).clock |= self.clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        # Work that was queued after the event keeps the device busy during this wait.
        is_busy = any(tick > self.clock[s] for s, tick in current_stream().clock.items())
        on_host_wait("event.synchronize" + (", late" if is_busy else ""))
        host.clock |= self.clock

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


def make_stream_class(torch: types.ModuleType) -> type:
    """Return a subclass of torch's stream class, for annotations and isinstance checks."""

    class Stream(torch.cpu.Stream):
        device_type = 1

        def __init__(self, *_args, **_kwargs) -> None:
            self.stream_id = next(_numbers)
            self.clock = Clock()

        @property
        def device(self):
            return torch.device("cuda", 0)

        device_index = 0

        def tick(self) -> None:
            """Count one more operation on this stream."""
            self.clock[self.stream_id] += 1

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.clock |= stream.clock

        def synchronize(self) -> None:
            on_host_wait("stream.synchronize")
            host.clock |= self.clock

        def __enter__(self) -> "Stream":
            self._inside = stream(self)
            self._inside.__enter__()
            return self

        def __exit__(self, *error) -> None:
            self._inside.__exit__(*error)

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

    return Stream


default_stream: Any  # a Stream, made by patch_cuda


def current_stream(device=None) -> Any:
    """Return this thread's current stream, by default `default_stream`."""
    return getattr(_current, "stream", default_stream)


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[None]:
    before = current_stream()
    _current.stream = chosen or before
    try:
        yield
    finally:
        _current.stream = before


def _synchronize(device=None) -> None:
    on_host_wait("torch.cuda.synchronize")
    host.clock |= default_stream.clock


def patch_cuda() -> None:
    """Make `torch.cuda` and `torch.accelerator` report an H200."""
    global default_stream
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    stream_class = make_stream_class(torch)
    default_stream = stream_class()
    card = types.SimpleNamespace(
        name="NVIDIA H200", total_memory=141 * 2**30, major=9, minor=0,
        multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, L2_cache_size=50 * 2**20,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, gcnArchName="",
    )  # fmt: skip
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": _synchronize,
        "get_device_name": lambda device=None: card.name,
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (card.total_memory, card.total_memory),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "Stream": stream_class,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default_stream,
        "stream": stream,
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, value)
    # Classes other than torch.cuda's, because the compiler registers one handler per class.
    torch.Stream = type("Stream", (stream_class,), {})
    torch.Event = type("Event", (Event,), {})
    torch.accelerator.empty_host_cache = lambda: None
    torch.accelerator.current_stream = lambda device=None: current_stream()
    torch.accelerator.synchronize = lambda device=None: _synchronize()
    torch.accelerator.current_device_index = lambda: 0
    init_process_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, *args, **kwargs: init_process_group(
        backend and backend.replace("nccl", "fake"), *args, **kwargs
    )
    FakeTensorMode.avoid_device_init = True
    # Without this call, torch.tensor(device="cuda") bypasses fake mode.
    torch._C._set_only_lift_cpu_tensors(True)
