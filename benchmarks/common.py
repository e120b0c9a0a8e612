"""What the benchmarks share: clocks, calls that take turns, the speed of matrix products, tables."""

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GIB, GB = 2**30, 1e9
Call = Callable[[], object]


def clock() -> float:
    """CPU-seconds of this process, which other load disturbs little; on a GPU wall seconds, after its work."""
    import torch

    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(*calls: Call, turns: int, seconds: Callable[[], float] = clock) -> list[list[float]]:
    """Return the seconds of each call in each turn, after one turn to warm up; who is first alternates."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        numbers = range(len(calls))
        for i in numbers if turn % 2 else reversed(numbers):
            started = seconds()
            calls[i]()
            found[i].append(seconds() - started)
    return [times[1:] for times in found]


def median_ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the turns' ratios, which a change of the machine's speed leaves alone."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def matmul_rate(dtype: str = "bfloat16") -> float:
    """Return the FLOP/s of the best of several matrix products; on a CPU of a small step's shape."""
    import torch

    on_gpu = torch.cuda.is_available()
    m, k, n = (8192, 8192, 8192) if on_gpu else (2048, 384, 1024)
    options = {"dtype": getattr(torch, dtype), "device": "cuda" if on_gpu else "cpu"}
    a, b = torch.randn(m, k, **options), torch.randn(k, n, **options)

    def four() -> None:
        for _ in range(4):
            a @ b

    return 4 * 2 * m * k * n / min(take_turns(four, turns=8)[0])


def status_bytes(key: str) -> int:
    """Return VmRSS, VmHWM, ... of this process; 0 where the system doesn't tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_header(*titles: str) -> None:
    print_row(*titles)
    print("|" + "---|" * len(titles), flush=True)
