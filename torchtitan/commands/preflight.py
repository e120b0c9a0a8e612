"""Check the machines of a job in half a minute, before the job starts.

    torchtitan preflight [X.toml] [--nproc N] [config overrides]       # one machine
    torchrun [...] -m torchtitan preflight X.toml [config overrides]   # on every machine; or with srun

Each rank looks at its own machine, then the ranks measure their links together. Every look has a time limit.
Results go to the store, so a rank that hangs doesn't stop the others. Rank 0 prints a table. Exit code 1: a
check failed.
"""

import hashlib
import json
import os
import platform
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.config import JobConfig
from torchtitan.config.manager import parse_args_or_exit
from torchtitan.distributed.processes.peers import differences
from torchtitan.distributed.processes.process_group import find_peers
from torchtitan.tools import torch_parts
from torchtitan.tools.errors import RunError
from torchtitan.tools.events import flat_settings
from torchtitan.tools.files import find_shipped
from torchtitan.tools.utils import get_device_info, run_beside, use_device

SECONDS_TO_ARRIVE = 15.0  # after rank 0
SECONDS_PER_LOOK = 10.0
_SECONDS_IN_ALL = 90.0
_SECONDS_TO_WRITE, _SECONDS_TO_SEE = 2.0, 3.0  # a file; a file that rank 0 wrote
_MIB, _GIB = 2**20, 2**30
LEAST_FREE_BYTES = _GIB  # of a disk
_MOST_USED_BYTES = 2 * _GIB  # of a GPU, before the job
_LARGEST_CLOCK_DIFFERENCE = 1.0  # seconds
_REPEATS = 4  # of a transfer; the fastest counts
SMALLEST_SHARE = (
    0.25  # of the fastest pair's bandwidth, for pairs inside hosts and for pairs between hosts
)
# Check -> what to do if it fails.
REMEDIES = {
    "ranks": "start them with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT; look at their output",
    "equal": "start all ranks with the same config, files and versions",
    "device": "look at nvidia-smi on that host; end what uses the GPU, or leave the host out",
    "disk": "make room on that host, correct its mount, or set another job.dump_folder",
    "shared": "mount one folder at the same path on all hosts: every rank writes its part of a checkpoint",
    "connect": "look at firewalls and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says more",
    "clock": "start chrony or ntpd on that host",
    "pairs": "test cables and network cards there; NCCL_DEBUG=INFO shows which network is used",
    "all-reduce": "look at the slow pairs above, or leave out one host after the other",
}


def main() -> None:
    """Make all checks; on every rank, exit with 1 if one of them failed on any rank."""
    config, has_failed = parse_args_or_exit(), True
    limit = threading.Timer(_SECONDS_IN_ALL, os._exit, (1,))
    limit.daemon = True
    limit.start()
    try:
        has_failed = Rank(config).check()
    except (RunError, ValueError, OSError, dist.DistError) as error:
        name = f"rank {os.environ.get('RANK', '0')} ({socket.gethostname()})"
        print(f"error: preflight of {name}: {_line(error)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(has_failed))  # at once, because a look may still wait for a disk or a network


class Rank:
    """This rank's looks. found, problems: by check."""

    def __init__(self, config: JobConfig) -> None:
        self.config, self.started, self.device = config, time.monotonic(), torch.device("cpu")
        self.found, self.problems = dict[str, Any](), dict[str, str]()
        self.entered = 0  # collectives, in a look that took too long
        self.store: dist.Store = dist.HashStore()
        self.rank, self.num_ranks = 0, 1
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            timeout = timedelta(seconds=SECONDS_TO_ARRIVE)
            self.store, self.rank, self.num_ranks = find_peers(timeout, waits_for_all=False)
        self.tell(f"host_{self.rank}", socket.gethostname())
        if self.rank == 0:
            came = self.come("host", range(self.num_ranks), SECONDS_TO_ARRIVE)
            self.tell("present", [came, secrets.token_hex(8)])
        self.present, self.nonce = self.hear("present", 2 * SECONDS_TO_ARRIVE)
        if self.rank not in self.present:
            raise RunError(f"it came more than {SECONDS_TO_ARRIVE:g} s after rank 0")

    def check(self) -> bool:
        """Make all looks; return whether a check failed on any rank. Rank 0 prints the table."""
        self.look("equal", self.equal)
        self.look("device", self.device_name)
        self.look("disk", self.disk)
        self.look("shared", self.shared)
        if len(self.present) > 1 and "device" in self.found:
            links = {
                "connect": self.connect,
                "clock": self.meet,
                "pairs": self.pairs,
                "all-reduce": self.all_reduce,
            }
            # Up to the first failure, after which the ranks' collectives may no longer match.
            all(self.look(check, function) for check, function in links.items())
        self.tell(f"report_{self.rank}", [self.found, self.problems, self.entered])
        if self.rank == 0:
            self.tell("has_failed", self.conclude())
        has_failed = bool(self.hear("has_failed", 4 * SECONDS_PER_LOOK))
        self.tell(f"end_{self.rank}", True)
        self.file(self.rank).unlink(missing_ok=True)
        if self.rank == 0:  # this process may hold the store
            self.come("end", self.present, 2)
        return has_failed

    def look(self, check: str, function: Callable[[], Any]) -> bool:
        """Keep what `function` returns, or why it failed; return whether it succeeded."""
        self.tell(f"at_{self.rank}", check)

        def on_device() -> Any:
            use_device(self.device)
            return function()

        before = _collectives_so_far()
        try:
            self.found[check] = run_beside(on_device).result(SECONDS_PER_LOOK)
        except TimeoutError:
            self.problems[check] = f"no answer within {SECONDS_PER_LOOK:g} s"
            self.entered = _collectives_so_far() - before
        except Exception as error:
            self.problems[check] = _line(error)
        return check in self.found

    # ---- looks at this machine ----

    def equal(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        digest, folder = hashlib.sha256(), Path(find_shipped(self.config.model.hf_assets_path))
        for path in sorted(folder.glob("*")):
            if path.name in ("vocab.json", "merges.txt") or "token" in path.name:
                digest.update(path.name.encode() + path.read_bytes())
        versions = {"torchtitan": torchtitan.__version__, "torch": torch.__version__}
        versions |= {"python": platform.python_version(), "CUDA": str(torch.version.cuda)}
        return {
            **flat_settings(self.config.to_dict()),
            **{f"the version of {name}": version for name, version in versions.items()},
            "the digest of the tokenizer": digest.hexdigest()[:12],
            "the device": get_device_info()[0],
        }

    def device_name(self) -> str:
        kind, module = get_device_info()
        if kind == "cpu":
            return f"{platform.machine()} with {os.cpu_count()} processors"
        index, count = int(os.environ.get("LOCAL_RANK", "0")), module.device_count()
        if index >= count:
            raise RunError(f"LOCAL_RANK is {index}, and the host has {count} {kind} device(s)")
        self.device = torch.device(kind, index)
        use_device(self.device)
        torch.ones(1, device=self.device).item()
        free, total = module.mem_get_info(self.device)
        if total - free > _MOST_USED_BYTES:
            raise RunError(
                f"{(total - free) / _GIB:.1f} of {total / _GIB:.0f} GiB are in use already"
            )
        return f"{module.get_device_name(self.device)}, {total / _GIB:.0f} GiB"

    def file(self, rank: int) -> Path:
        """Return a rank's file in the folder of checkpoints, or without these in the job's."""
        name = self.config.checkpoint.folder if self.config.checkpoint.enable else ""
        return Path(self.config.job.dump_folder, name, f".preflight-{self.nonce}-{rank}")

    def disk(self) -> tuple[float, float] | None:
        """Return the folder's free bytes, and the bytes per second of writing. Once per host."""
        path, written = self.file(self.rank), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        space = os.statvfs(path.parent)
        if (free := space.f_bavail * space.f_frsize) < LEAST_FREE_BYTES:
            raise RunError(f"{free / _GIB:.2f} GiB are free in {path.parent}")
        chunk, started = secrets.token_bytes(4 * _MIB), time.perf_counter()
        try:
            with open(path, "xb", buffering=0) as file:
                while written < 64 * _MIB and time.perf_counter() - started < _SECONDS_TO_WRITE:
                    written += file.write(chunk)
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{path.parent} cannot be written: {error.strerror}") from error
        return free, written / (time.perf_counter() - started)

    def shared(self) -> bool:
        """Return whether rank 0's file is there on this rank."""
        if self.rank == 0:
            self.tell("written", True)
        self.hear("written", SECONDS_PER_LOOK - _SECONDS_TO_SEE)
        deadline = time.monotonic() + _SECONDS_TO_SEE
        while not (is_there := self.file(0).is_file()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return is_there

    # ---- looks at the network, which all ranks make together ----

    def connect(self) -> bool:
        self.bytes = (16 if self.device.type == "cpu" else 128) * _MIB
        self.index, self.size = self.present.index(self.rank), len(self.present)
        dist.init_process_group(
            dist.Backend.default_device_backend_map.get(self.device.type, "nccl"),
            store=dist.PrefixStore("links", self.store),
            rank=self.index,
            world_size=self.size,
            timeout=timedelta(seconds=2 * _SECONDS_IN_ALL),  # otherwise NCCL might end this process
            device_id=None if self.device.type == "cpu" else self.device,
        )
        self.meet()
        return True

    def meet(self) -> float:
        """Return the time right after a meeting of all ranks."""
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones)
        ones.item()  # waits for the device
        return time.time()

    def pairs(self) -> list[tuple[int, int, float]]:
        """Return (rank, next rank, bytes per second in each direction) for the pair that this rank begins."""
        speeds = []
        sends, gets = (torch.ones(self.bytes, dtype=torch.uint8, device=self.device) for _ in "12")

        def exchange(other: int) -> None:
            pair = [dist.P2POp(dist.isend, sends, other), dist.P2POp(dist.irecv, gets, other)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            gets[:1].cpu()  # waits for the device

        for turn in (0, 1):  # the pairs that begin with an even rank, then the others
            first = self.index if self.index % 2 == turn else self.index - 1
            if 0 <= first < self.size - 1:
                seconds = _fastest(lambda other=2 * first + 1 - self.index: exchange(other))
                if first == self.index:
                    speeds.append((self.rank, self.present[first + 1], self.bytes / seconds))
            self.meet()
        return speeds

    def all_reduce(self) -> float:
        """Return the bus bandwidth, in bytes per second: what a link of a ring carries in each direction."""
        values = torch.ones(self.bytes // 4, device=self.device)
        seconds = _fastest(lambda: (dist.all_reduce(values), values[:1].cpu()))
        return self.bytes / seconds * 2 * (self.size - 1) / self.size

    # ---- messages ----

    def tell(self, key: str, value: Any) -> None:
        self.store.set(f"preflight_{key}", json.dumps(value, default=str))

    def hear(self, key: str, seconds: float = SECONDS_PER_LOOK) -> Any:
        self.store.wait([f"preflight_{key}"], timedelta(seconds=seconds))
        return json.loads(self.store.get(f"preflight_{key}"))

    def come(self, key: str, ranks: Iterable[int], seconds: float) -> list[int]:
        """Return those of the ranks that have told KEY_RANK within `seconds`."""
        deadline, missing = time.monotonic() + seconds, list(ranks)
        while missing and time.monotonic() < deadline:
            missing = [r for r in missing if not self.store.check([f"preflight_{key}_{r}"])]
            time.sleep(0.05 if missing else 0)
        return [rank for rank in ranks if rank not in missing]

    # ---- the table, on rank 0 ----

    def conclude(self) -> bool:
        """Print the table; return whether a check failed."""
        hosts = {rank: self.hear(f"host_{rank}") for rank in self.present}
        came = self.come("report", self.present, 2 * SECONDS_PER_LOOK)
        found: dict[str, dict[int, Any]] = {check: {} for check in REMEDIES}
        same: dict[tuple[str, str], list[int]] = {}  # (check, problem) -> ranks
        entered: dict[int, int] = {}
        for rank in self.present:
            if rank in came:
                results, problems, entered[rank] = self.hear(f"report_{rank}")
            else:
                results, problems = {}, {self.hear(f"at_{rank}"): "it has not gone on from here"}
            for check, result in results.items():
                found[check][rank] = result
            for check, text in problems.items():
                same.setdefault((check, text), []).append(rank)
        texts, problems = judge(found, hosts, self.num_ranks, self.config.checkpoint.enable)
        for (check, text), ranks in same.items():
            numbers = {rank: entered.get(rank, 0) for rank in ranks}
            late = [rank for rank in ranks if numbers[rank] < max(numbers.values())]
            if late and check != "pairs":  # in which ranks have different numbers of neighbours
                text += f"; {name_of(late, hosts)} kept the others waiting"
            problems[check].insert(0, f"{name_of(ranks, hosts)}: {text}")
        for check, remedy in REMEDIES.items():
            verdict = "FAIL" if problems[check] else "ok" if texts[check] else "-"
            print(f"{verdict:4}  {check:10}  {texts[check] or 'not measured'}")
            for line in [*problems[check], f"-> {remedy}"] if problems[check] else []:
                print(f"{'':18}{line}")
        num_failed, seconds = sum(map(bool, problems.values())), time.monotonic() - self.started
        print(f"preflight: {num_failed or 'no'} check(s) failed, in {seconds:.1f} s", flush=True)
        return num_failed > 0


def judge(
    found: dict[str, dict[int, Any]], hosts: dict[int, str], num_ranks: int, needs_sharing: bool
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return check -> its numbers as a text, and check -> its problems.

    found: check -> rank -> result. hosts: of the ranks that came. needs_sharing: for checkpoints.
    """
    problems: dict[str, list[str]] = {check: [] for check in REMEDIES}
    texts, labels = dict.fromkeys(REMEDIES, ""), {rank: name_of([rank], hosts) for rank in hosts}
    texts["ranks"] = ", ".join(
        f"{n} on {host}" for host, n in Counter(hosts.values()).most_common(8)
    )
    if missing := [rank for rank in range(num_ranks) if rank not in hosts]:
        problems["ranks"] = [
            f"{name_of(missing)} of {num_ranks} did not come in {SECONDS_TO_ARRIVE:g} s"
        ]
    problems["equal"] = differences({labels[rank]: own for rank, own in found["equal"].items()})
    texts["equal"] = "config, tokenizer, versions of torchtitan, torch, python and CUDA"
    devices = Counter(found["device"].values()).most_common()
    texts["device"] = "; ".join(f"{n} x {name}" for name, n in devices)
    if disks := [(*disk, hosts[rank]) for rank, disk in found["disk"].items() if disk]:
        (free, _, full), (speed, slow) = min(disks), min(disk[1:] for disk in disks)
        texts["disk"] = f"{free / _GIB:,.0f} GiB free ({full}), writes {_rate(speed)} ({slow})"
    blind = [rank for rank, is_there in found["shared"].items() if not is_there]
    texts["shared"] = "all ranks see the file of rank 0"
    if blind and needs_sharing:
        text = "the folder of checkpoints is not that of rank 0"
        problems["shared"] = [f"{name_of(blind, hosts)}: {text}"]
    if blind:
        texts["shared"] = "not shared" + ", and not needed without checkpoint.enable" * (
            not needs_sharing
        )
    texts["connect"] = "all ranks" if found["connect"] else ""
    if clocks := found["clock"]:
        usual = statistics.median_low(clocks.values())
        largest = max(abs(own - usual) for own in clocks.values())
        texts["clock"] = f"at most {largest:.2g} s from the median"
        problems["clock"] = [
            f"{labels[rank]}: {abs(own - usual):.1f} s {'ahead of' if own > usual else 'behind'} the median"
            for rank, own in clocks.items()
            if abs(own - usual) > _LARGEST_CLOCK_DIFFERENCE
        ]
    pairs = [pair for own in found["pairs"].values() for pair in own]
    for kind, is_inside in ("inside hosts", True), ("between hosts", False):
        some = [(x, [a, b]) for a, b, x in pairs if (hosts[a] == hosts[b]) is is_inside]
        if some:
            fastest = max(some)[0]
            texts["pairs"] += f"{_rate(min(some)[0])} to {_rate(fastest)} {kind} "
            problems["pairs"] += [
                f"{name_of(ranks, hosts)}: {_rate(speed)}"
                for speed, ranks in sorted(some)
                if speed < SMALLEST_SHARE * fastest
            ]
    if speeds := found["all-reduce"].values():
        texts["all-reduce"] = f"{_rate(min(speeds))} bus bandwidth over {len(speeds)} ranks"
    return texts, problems


def name_of(ranks: list[int], hosts: dict[int, str] | None = None) -> str:
    """Return e.g. "ranks 0, 1 (node0) and rank 2 (node1)"."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(f" ({hosts[rank]})" if hosts else "", []).append(str(rank))
    names = (f"rank{'s' * (len(x) > 1)} {', '.join(x)}{host}" for host, x in by_host.items())
    return " and ".join(names)


def _collectives_so_far() -> int:
    return torch_parts.collectives_so_far(dist.group.WORLD) if dist.is_initialized() else 0


def _fastest(transfer: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of some transfers."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        transfer()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    main()
