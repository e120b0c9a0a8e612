"""A task for SkyPilot's managed jobs, which move a job to other machines when these are lost."""

import os
from typing import Any

from torchtitan.cluster.job import STOPPED, ClusterJob, to_yaml

_CONFIG_FILE = "~/torchtitan_job.toml"


def task(job: ClusterJob) -> str:
    """Return the YAML for `sky jobs launch`. Without an image, the nodes install a clone of this project."""
    endpoint, is_host = "\"${SKYPILOT_NODE_IPS%%$'\\n'*}\":29400", "$((SKYPILOT_NODE_RANK==0))"
    arguments = [f"--job.stopped_exit_code={STOPPED}"]
    command = job.torchrun(endpoint, is_host, "HOME_FILE", arguments, "$SKYPILOT_NUM_NODES")
    command = command.replace("HOME_FILE", _CONFIG_FILE.replace("~", "$HOME"))
    resources: dict[str, Any] = {
        # A lost machine does not count as an error. The ranks themselves start again after errors.
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [STOPPED]},
    }
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator}:{job.gpus}"
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.max_nodes, "resources": resources}
    task["envs"] = job.environment
    task["file_mounts"] = {_CONFIG_FILE: os.path.abspath(job.config_file)}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    else:
        task |= {"workdir": ".", "setup": "pip install -c constraints.txt ."}
    if job.volume:
        task["volumes"] = {"/work": job.volume}
        command = f"cd /work\n{command}"
    return to_yaml(task | {"run": command + "\n"})
