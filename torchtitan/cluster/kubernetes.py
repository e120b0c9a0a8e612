"""Manifests for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer 2.3 with its runtime.

Pods that fail are created again by their Job, and the agents in the other pods wait for them, or go on
without them if the job is elastic. Exit codes of a pod decide what happens (`_FAILURES`).
"""

from typing import Any

from torchtitan.cluster.job import SERVER_PORT, STOPPED, ClusterJob, to_yaml

_RENDEZVOUS_PORT = 29400
_RUNTIME = "torchtitan"  # name of the ClusterTrainingRuntime, which all jobs share
_CONFIG_FOLDER = "/etc/torchtitan"
_FIRST_POD = "$((JOB_COMPLETION_INDEX==0))"

# What one GPU needs besides itself, by network: resource -> count per node.
_NETWORK_RESOURCES = {"tcp": {}, "infiniband": {"rdma/hca": 1}, "efa": {"vpc.amazonaws.com/efa": 1}}

# Applied in this order to a pod that ended.
_FAILURES = {
    "rules": [
        # The config cannot run: no attempt can succeed.
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]},
        },
        # The pod had to leave its node, or saved and ended: it is created again, however often.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": "node", "operator": "In", "values": [STOPPED]},
        },
        # All other failures count towards `backoffLimit`.
    ]
}


def jobset(job: ClusterJob) -> str:
    """Return a ConfigMap and a JobSet of the trainer's pods and, for RL, the servers' pods."""
    hosts = [f"{job.name}-server-0-{i}.{job.name}" for i in range(job.servers)]
    endpoint = f"{job.name}-node-0-0.{job.name}:{_RENDEZVOUS_PORT}"
    node = _container(job, _command(job, endpoint, job.server_arguments(hosts)))
    trainer = _trainer_job(job.max_restarts * job.max_nodes, [node], _volumes(job))
    trainer["template"]["spec"]["terminationGracePeriodSeconds"] = job.grace_seconds
    jobs = [_replicated("node", job.max_nodes, trainer)]
    spec: dict[str, Any] = {"network": {"enableDNSHostnames": True, "subdomain": job.name}}
    if job.servers:
        # The servers run as long as the trainer.
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["node"]}
        jobs.append(_replicated("server", job.servers, _server_job(job)))
    spec["replicatedJobs"] = jobs
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": spec,
    }
    return to_yaml(_config_map(job), manifest)


def train_job(job: ClusterJob) -> str:
    """Return a ClusterTrainingRuntime, which an administrator applies once, a ConfigMap and a TrainJob."""
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    shm = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    node: dict[str, Any] = {
        "name": "node",
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    replicated = _replicated("node", 1, _trainer_job(100, [node], shm))
    replicated["template"]["metadata"] = {"labels": step}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {
            "name": _RUNTIME,
            "labels": {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"replicatedJobs": [replicated]}},
        },
    }
    container = _container(job, _command(job, f"$PET_MASTER_ADDR:{_RENDEZVOUS_PORT}", []))
    of_container = {"name": "node", "volumeMounts": container["volumeMounts"][1:]}
    if "securityContext" in container:
        of_container["securityContext"] = container["securityContext"]
    pod = {
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [of_container],
        "volumes": _volumes(job)[1:],
    }
    patch = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": _RUNTIME},
            "trainer": {
                "numNodes": job.max_nodes,
                "numProcPerNode": job.ranks_per_node,
                "image": job.image,
                "command": container["command"],
                "env": container["env"],
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {
                    "manager": "torchtitan",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }
    return to_yaml(runtime, _config_map(job), manifest)


def _command(job: ClusterJob, endpoint: str, arguments: list[str]) -> str:
    """Return the shell command of one pod."""
    arguments = [*arguments, f"--job.stopped_exit_code={STOPPED}"]
    return "exec " + job.torchrun(endpoint, _FIRST_POD, f"{_CONFIG_FOLDER}/job.toml", arguments)


def _container(job: ClusterJob, command: str) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if job.gpus:
        limits = {"nvidia.com/gpu": job.gpus} | _NETWORK_RESOURCES[job.network]
    container: dict[str, Any] = {
        "name": "node",
        "image": job.image,
        "command": ["bash", "-c", command],
        "workingDir": "/work",
        "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        "resources": {
            "requests": {"cpu": str(job.cpus * job.ranks_per_node)},
            "limits": {name: str(count) for name, count in limits.items()},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "config", "mountPath": _CONFIG_FOLDER},
        ],
    }
    if job.network != "tcp":  # RDMA pins memory
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if job.volume:
        container["volumeMounts"].append({"name": "work", "mountPath": "/work"})
    return container


def _volumes(job: ClusterJob) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        # NCCL and data workers need more than the 64 MiB of a container.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "config", "configMap": {"name": job.name}},
    ]
    if job.volume:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": job.volume}})
    return volumes


def _trainer_job(
    backoff_limit: int, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the spec of the Job whose pods train. backoff_limit: pods that may fail."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # which podFailurePolicy needs
        "containers": containers,
        "volumes": volumes,
    }
    return {
        "backoffLimit": backoff_limit,
        "podFailurePolicy": _FAILURES,
        "template": {"spec": pod},
    }


def _server_job(job: ClusterJob) -> dict[str, Any]:
    """Return the spec of the Job whose pods are vLLM servers; the kubelet starts them again."""
    health = {"httpGet": {"path": "/health", "port": SERVER_PORT}}
    server = _container(job, "exec env " + job.server_command("python"))
    server |= {
        "name": "server",
        "ports": [{"containerPort": SERVER_PORT, "protocol": "TCP"}],
        # A large model may take half an hour to load.
        "startupProbe": health | {"periodSeconds": 10, "failureThreshold": 180},
        "livenessProbe": health | {"periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5},
    }
    pod = {"restartPolicy": "OnFailure", "containers": [server], "volumes": _volumes(job)}
    return {"backoffLimit": job.max_restarts * job.servers, "template": {"spec": pod}}


def _replicated(name: str, pods: int, spec: dict[str, Any]) -> dict[str, Any]:
    counts = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
    return {"name": name, "replicas": 1, "template": {"spec": counts | spec}}


def _config_map(job: ClusterJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name},
        "data": {"job.toml": job.config_text},
    }
