"""The pods of a printed JobSet as processes of this machine, each with folders of its own.

Does what a kubelet does with the manifest: expands variables, mounts the ConfigMap and the volume, and sets
the pod's index. Names of hosts become localhost.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.reliability import jobs


class Pods:
    """volume: what all pods mount as their working folder. config_map, job: `spec.replicatedJobs[0]` and the
    ConfigMap of the manifest.
    """

    def __init__(self, folder: Path, config_map: dict[str, Any], job: dict[str, Any]):
        self.folder, self.volume = folder, folder / "volume"
        self.volume.mkdir()
        (folder / "bin").mkdir()
        python = folder / "bin/python"  # no link: it would not find its packages
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self._files, self._port = config_map["data"], jobs.free_port()
        (self._container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, index: int) -> subprocess.Popen:
        own = self.folder / f"pod-{index}"
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        for name, text in self._files.items():
            (own / name).write_text(text)
        (mount,) = [m for m in self._container["volumeMounts"] if m["name"] == "config"]
        command = [
            part.replace(mount["mountPath"], str(own)) for part in self._container["command"]
        ]
        command = [re.sub(r"(endpoint=)\S+", rf"\1localhost:{self._port}", c) for c in command]
        variables = {entry["name"]: entry["value"] for entry in self._container["env"]}
        variables |= {"JOB_COMPLETION_INDEX": str(index), "TMPDIR": str(own / "tmp")}
        variables |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        variables |= {"PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1"}
        with open(own / "log", "a") as log:
            self.processes[index] = subprocess.Popen(
                command,
                cwd=self.volume,
                env=os.environ | variables,
                stdout=log,
                stderr=log,
            )
        return self.processes[index]

    def kill(self, index: int) -> None:
        """End a pod's agent and ranks at once, as a machine that is lost."""
        pids = [self.processes[index].pid, *_children(self.processes[index].pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.processes.pop(index).wait()

    def are_running(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())

    def kill_all(self) -> None:
        for index, process in list(self.processes.items()):
            if process.poll() is None:
                self.kill(index)

    def log(self, index: int) -> str:
        return (self.folder / f"pod-{index}/log").read_text(errors="replace")


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
