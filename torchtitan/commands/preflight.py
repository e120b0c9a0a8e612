"""Check the machines of a job before it starts, in at most half a minute.

    torchtitan preflight [X.toml] [--nproc N] [config overrides]       # one machine
    torchrun [...] -m torchtitan preflight X.toml [config overrides]   # on every machine; or with srun

Exit code 1: a check failed. 2: the ranks' configs or versions differ.
"""

import contextlib
import faulthandler
import itertools
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.config.job_config import Comm
from torchtitan.config.manager import parse_args_or_exit
from torchtitan.distributed.processes.late_ranks import Progress
from torchtitan.distributed.processes.peers import PeerError, Peers
from torchtitan.distributed.processes.process_group import find_peers, init_distributed
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.tools import signals, storage
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file
from torchtitan.tools.host import has_peers
from torchtitan.tools.logging import init_logger
from torchtitan.tools.utils import get_device_info

SECONDS_IN_ALL, SECONDS_PER_COLLECTIVE, SECONDS_STUCK = 30, 10, 4.0
# A pair fails below this share of the fastest pair's bandwidth.
SMALLEST_SHARE = 0.25
_GIB, _GB = 2**30, 1e9
_runs = itertools.count()
# Name of a method of `Checks` -> what to do if the check fails.
_REMEDIES = {
    "device": "look at nvidia-smi there; end what uses the GPU, or leave the host out",
    "disk": "make room there, correct the mount, or set another job.dump_folder",
    "shared_folder": "mount one folder at the same path on all hosts, or set job.dump_folder",
    "clock": "start chrony or ntpd there",
    "pairs": "test cables and cards there; NCCL_DEBUG=INFO shows which network is used",
    "all_reduce": "",
}


def main() -> None:
    """Make all checks; exit with `os._exit`, because at a normal exit torch waits for ranks that hang."""
    config, code = parse_args_or_exit(), 1
    init_logger()
    try:
        code = int(run(config))
    except PeerError:  # rank 0 has printed the error
        code = 2
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: rank {os.environ.get('RANK', '0')}: {_line(error)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(config: JobConfig) -> bool:
    """Make all checks; return whether one failed on any rank. Names a rank that hangs."""
    timeout = SECONDS_PER_COLLECTIVE
    comm = Comm(init_timeout_seconds=timeout, stuck_rank_seconds=SECONDS_STUCK, trace_buf_size=0)
    peers, progress = None, Progress()
    if has_peers():
        store, rank, size = find_peers(timedelta(seconds=SECONDS_IN_ALL))
        peers = Peers(dist.PrefixStore(f"preflight_{next(_runs)}", store), rank, size)
        signals.at_start.tell_by(peers.report)
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        versions |= {"CUDA": torch.version.cuda or "", "device": get_device_info()[0]}
        peers.compare(config.to_dict() | {"the version of": versions})
        peers.watch(comm, progress)
    faulthandler.dump_traceback_later(SECONDS_IN_ALL, exit=True)
    try:
        init_distributed(comm, enable_cpu_backend=True)
        # The watch for late ranks skips this group, in which ranks run different numbers of sends.
        progress.pipeline = dist.new_group()
        has_failed = Checks(config, progress.pipeline).run()
        dist.destroy_process_group()
    except RuntimeError as error:  # communication failed
        if peers is not None:
            peers.report(_line(error))
        raise
    faulthandler.cancel_dump_traceback_later()
    if peers is not None:
        peers.leave()
    return has_failed


class Checks:
    """The checks of one rank. Each check returns {unit: number}, or raises RunError or OSError."""

    def __init__(self, config: JobConfig, group_of_pairs: dist.ProcessGroup) -> None:
        self.group_of_pairs = group_of_pairs
        self.rank, self.size, self.at = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.hosts = all_ranks(socket.gethostname())
        self.names = [f"rank {rank} ({host})" for rank, host in enumerate(self.hosts)]
        folder, self.bucket = config.checkpoint.places() if config.checkpoint.enable else ("", "")
        self.needs_shared_folder = config.checkpoint.enable and not self.bucket
        nonce, root = all_ranks(secrets.token_hex(8))[0], config.job.dump_folder
        root = storage.require_disk("job.dump_folder", root)
        self.file = Path(root, folder, f".preflight_{nonce}")  # rank 0 creates this file

    def run(self) -> bool:
        """Make all checks; return whether one failed on any rank. Rank 0 prints numbers and errors."""
        started, failed = time.monotonic(), list[str]()
        for check, remedy in _REMEDIES.items():
            if check == "clock" and (self.size == 1 or failed[:1] == ["device"]):
                break
            figures, fault = dict[str, float](), ""
            try:
                figures = getattr(self, check)()
            except (RunError, OSError) as error:
                fault = f"      {self.names[self.rank]}: {_line(error)}; {remedy}"
            answers = all_ranks((figures, fault))
            faults, texts = [fault for _, fault in answers if fault], list[str]()
            failed += [check] * bool(faults)
            for unit in dict.fromkeys(unit for own, _ in answers for unit in own):
                own = [(x[unit], self.names[i]) for i, (x, _) in enumerate(answers) if unit in x]
                (least, name), (most, _) = min(own), max(own)
                more = f" (least on {name}) to {most:.3g}" * (most > least)
                texts.append(f"{least:.3g}{more} {unit}")
            if self.rank == 0:
                head = f"{'FAIL' if faults else 'ok':4}  {check:13}  {'; '.join(texts)}"
                print(head.rstrip(), *faults, sep="\n", flush=True)
        with contextlib.suppress(OSError):
            self.file.unlink()
        if self.rank == 0:
            text = f"{self.size} ranks on {len(set(self.hosts))} hosts, {time.monotonic() - started:.1f} s"
            print(f"preflight: {', '.join(failed) or 'nothing'} failed; {text}", flush=True)
        return bool(failed)

    def device(self) -> dict[str, float]:
        kind, module = get_device_info()
        if kind == "cpu":
            return {f"processors ({platform.machine()})": os.cpu_count() or 0}
        self.at = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        module.set_device(self.at)
        free, total = module.mem_get_info(self.at)
        if total - free > 3 * _GIB:
            raise RunError(f"{(total - free) / _GIB:.1f} of {total / _GIB:.0f} GiB are in use")
        return {f"GiB ({module.get_device_name(self.at)})": total / _GIB}

    def disk(self) -> dict[str, float]:
        """Measure write speed and free space of the checkpoint folder; one rank per host writes a file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self.file.touch()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return {}
        free, chunk, written = (
            shutil.disk_usage(self.file.parent).free,
            secrets.token_bytes(2**22),
            0,
        )
        if free < _GIB:
            raise RunError(f"only {free / _GIB:.2f} GiB are free in {self.file.parent}")
        path, started = self.file.with_suffix(f".{self.rank}"), time.perf_counter()
        try:
            with open_file(path, "xb", buffering=0) as file:
                while written < 2**26 and time.perf_counter() - started < 2:
                    written += file.write(chunk)
                    os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)
        return {"GB/s": written / (time.perf_counter() - started) / _GB, "GiB free": free / _GIB}

    def shared_folder(self) -> dict[str, float]:
        if self.bucket:
            storage.check_writable(self.bucket)
            return {"address that takes checkpoints": 1}
        if self.file.exists():
            return {"folder": 1}
        if self.needs_shared_folder:
            raise RunError(
                f"rank 0 sees another folder at {self.file.parent}; checkpoints need a shared folder"
            )
        return {"folders of other hosts, which only checkpoints need to share": 1}

    def clock(self) -> dict[str, float]:
        all_ranks(None)  # wait for all ranks
        times = all_ranks(time.time())
        if abs(own := times[self.rank] - times[0]) > 1:
            raise RunError(f"{abs(own):.1f} s {'ahead of' if own > 0 else 'behind'} rank 0's clock")
        return {"s from rank 0's": abs(own)}

    def pairs(self) -> dict[str, float]:
        """Return the bandwidth between this rank and the next; {} on the last rank."""
        numbers, own = 2 ** (21 if self.at.type == "cpu" else 24), None
        self.sent, self.got = (torch.ones(numbers, device=self.at) for _ in "12")
        # First exchange in the pairs whose first rank is even, then in the pairs whose first rank is odd.
        for turn in (0, 1):
            first = self.rank - (self.rank + turn) % 2
            if 0 <= first < self.size - 1:
                speed = self.speed(partial(self.exchange, 2 * first + 1 - self.rank))
                own = speed if first == self.rank else own
            speeds = all_ranks(own)
        kinds = [a == b for a, b in itertools.pairwise(self.hosts)]
        if own is None:
            return {}
        kind = kinds[self.rank]
        fastest = max(x for x, other in zip(speeds, kinds, strict=False) if other is kind)
        if own < SMALLEST_SHARE * fastest:
            other = self.names[self.rank + 1]
            raise RunError(f"{own:.3g} GB/s with {other}, while another pair has {fastest:.3g}")
        return {f"GB/s {'inside' if kind else 'between'} hosts": own}

    def exchange(self, other: int) -> None:
        operations = (dist.isend, self.sent), (dist.irecv, self.got)
        pair = [dist.P2POp(operation, x, other, self.group_of_pairs) for operation, x in operations]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def all_reduce(self) -> dict[str, float]:
        """Return the bus bandwidth: what each link of a ring carries in each direction."""
        own = self.speed(lambda: dist.all_reduce(self.got))
        return {"GB/s of each link": own * 2 * (self.size - 1) / self.size}

    def speed(self, transfer: Callable[[], Any]) -> float:
        """Return the GB/s of the fastest of four transfers."""
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            transfer()
            # Wait for the device.
            self.got[:1].cpu()
            seconds.append(time.perf_counter() - started)
        return self.got.nbytes / min(seconds) / _GB


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    main()
