"""What `torchtitan launch` prints is what the engines read, and says no to jobs that they cannot run."""

import copy
import os
import re
import shlex
import subprocess

import pytest
import yaml

from tests.unit.cluster.printed import documents, printed
from torchtitan.cluster.engines import STOPPED
from torchtitan.commands import launch
from torchtitan.estimate import plan
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.events import exit_code

JOB = """
[training]
global_batch_size = 48
local_batch_size = 1
steps = 40

[checkpoint]
enable = true
"""
SHARED = "--job.dump_folder=/shared"
BUCKET = "--checkpoint.folder=s3://bucket/run"
PODS = ("--image=ghcr.io/me/titan:1", "--volume=shared")


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "My Job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def rl_job(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text(JOB + "[rl]\nasync_steps = 0\n")
    return path


# ---- Kubernetes ----


def known_fields(document):
    """Return the document as the models of the Kubeflow Trainer's OpenAPI description understand it."""
    from kubeflow_trainer_api import models

    kinds = {
        "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
        "JobSet": models.JobsetV1alpha2JobSet,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    return kinds[document["kind"]].from_dict(document).to_dict()


@pytest.mark.parametrize(
    ("engine", "network"), [("kubernetes", "efa"), ("jobset", "infiniband"), ("jobset", "tcp")]
)
def test_manifests_have_only_fields_of_the_published_schemas(engine, network, rl_job):
    options = (f"--config={rl_job}", "--nodes=2:3", "--servers=2", f"--network={network}")
    found = documents(engine, *options, *PODS)
    # Kubeflow's webhook refuses a TrainJob whose runtime is not there yet.
    kinds = ["ClusterTrainingRuntime", "TrainJob"] if engine == "kubernetes" else ["JobSet"]
    assert [document["kind"] for document in found] == ["ConfigMap", *kinds]
    for document in found:
        assert known_fields(document) == document
    wrong = copy.deepcopy(found[-1])
    wrong["spec"]["replicatedJob"] = []
    assert known_fields(wrong) != wrong  # so that the comparison sees a wrong key


def test_jobset_of_rl_has_servers_that_are_started_again_and_known_to_the_trainer(rl_job):
    options = (f"--config={rl_job}", "--nodes=3", *PODS, "--servers=2")
    *_, jobset = documents("jobset", *options)
    _, runtime, _ = documents("kubernetes", *options)
    assert runtime["spec"]["template"]["spec"] == jobset["spec"]
    spec = jobset["spec"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["node"]
    node, server = (job["template"]["spec"] for job in spec["replicatedJobs"])
    assert (node["completions"], server["completions"]) == (3, 2)
    pod = server["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure"
    (container,) = pod["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert "vllm.entrypoints.openai.api_server" in container["command"][-1]
    command = node["template"]["spec"]["containers"][0]["command"][-1]
    assert "--rl.generator.url=http://rl-server-0-0.rl:8000,http://rl-server-0-1.rl:8000" in command
    assert "-m torchtitan.rl.train" in command


def test_server_has_room_for_an_episode_and_its_own_memory_settings(rl_job, tmp_path):
    """The last token of a row is only a label, so that an episode has one more. CUDA graphs need plain memory."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\nenv; echo "$@"\n')
    stand_in.chmod(0o755)
    options = (f"--config={rl_job}", "--nodes=3", "--servers=2", "--training.seq_len=64")
    *_, jobset = documents("jobset", *options, *PODS)
    container = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    (container,) = container["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert "PYTORCH_ALLOC_CONF" in variables  # which the trainer has
    variables["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.check_output(container["command"], env=variables, text=True)
    assert "VLLM_SERVER_DEV_MODE=1\n" in ran and "PYTORCH_ALLOC_CONF" not in ran
    assert " --max-model-len=65 " in ran
    ours = re.search(r"exec (env .*) python -m", container["command"][-1])[1]
    assert f" server {ours.removeprefix('env ')} " in printed("slurm", *options)


def test_elastic_job_that_ends_with_fewer_pods_is_complete(job):
    def policy(nodes):
        *_, jobset = documents("jobset", f"--config={job}", f"--nodes={nodes}", *PODS)
        return jobset["spec"]["replicatedJobs"][0]["template"]["spec"].get("successPolicy")

    assert policy("2:3") == {"rules": [{"succeededIndexes": "0"}]}  # pod 0 holds the rendezvous
    assert policy("3") is None


def test_pods_that_end_are_treated_as_the_trainers_exit_codes_mean(job):
    *_, jobset = documents("jobset", f"--config={job}", "--nodes=3", *PODS)
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]

    def action(code):
        for rule in spec["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {"values": ()})["values"]:
                return rule["action"]
        return "count"

    assert action(exit_code(ConfigError("no such key"))) == "FailJob"
    assert action(exit_code(RunError("disk full"))) == action(137) == "count"
    assert action(STOPPED) == "Ignore"
    assert f"--job.stopped_exit_code={STOPPED}" in str(spec["template"])
    assert spec["backoffLimit"] == 10 * 3
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which the policy requires
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 600


def test_the_config_travels_with_the_manifest_word_for_word(job):
    config_map, _ = documents("jobset", f"--config={job}", "--nodes=3", *PODS)
    assert config_map["data"] == {"job.toml": JOB}
    assert config_map["metadata"]["name"] == "my-job"


# ---- the other engines ----


def test_script_for_slurm_is_bash_with_every_place_filled(job, rl_job):
    for options in ([job, "--nodes=3"], [rl_job, "--nodes=3", "--servers=1"]):
        script = printed("slurm", "--config", *options)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert not re.search(r"@[A-Z_]+@", script)
    assert "#SBATCH --nodes=4" in script and "WORLD_SIZE=24" in script
    assert '--rl.generator.url="$urls"' in script


def test_skypilot_recovers_from_lost_machines_and_stops_alone(job):
    options = [f"--config={job}", "--nodes=3", "--volume=shared"]
    task = yaml.safe_load(printed("skypilot", *options))
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [STOPPED]}
    assert task["resources"] == {"job_recovery": recovery, "accelerators": "H100:8"}
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


@pytest.mark.slow
def test_skypilot_reads_its_task(job, tmp_path):
    """Needs skypilot, in an environment of its own."""
    pytest.importorskip("sky")
    from sky import Task

    path = tmp_path / "task.yaml"
    path.write_text(printed("skypilot", f"--config={job}", "--nodes=3", *PODS))
    task = Task.from_yaml(str(path))
    (resources,) = task.resources
    assert task.num_nodes == 3 and resources.accelerators == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [STOPPED]


def test_ray_is_given_one_command_for_training_and_one_for_verl(job):
    words = shlex.split(printed("ray", f"--config={job}", "--nodes=3", "--env=A=b c", SHARED))
    assert words[:4] == ["ray", "job", "submit", "--working-dir"]
    assert words[words.index("--") + 1 :][:3] == ["python", "-m", "torchtitan.cluster.ray"]
    assert '"A": "b c"' in words[words.index("--runtime-env-json") + 1]
    words = shlex.split(printed("verl", "--nodes=2", "--network=infiniband", "+a=1"))
    assert '"NCCL_IB_HCA": "mlx5"' in words[words.index("--runtime-env-json") + 1]
    assert words[-2:] == ["trainer.n_gpus_per_node=8", "+a=1"]


def test_plan_adds_the_flags_of_the_fastest_layout(job, monkeypatch):
    layout = plan.Layout(replicas=1, shards=12, tp=2, pp=1, cp=1, rows=2)
    fastest = plan.Planned(layout, 1, None, plan.Bound(1, 0, 0, 0, 1.0, 0.5))
    stdout = f"the table\n\n{plan.winner_of([fastest])}\n"
    done = subprocess.CompletedProcess([], 0, stdout=stdout)
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: done)
    script = printed("slurm", f"--config={job}", "--nodes=3", "--plan")
    for flag in ("parallelism.tensor_parallel_degree=2", "training.global_batch_size=24"):
        assert f" --{flag}" in script


# ---- refusals ----


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        printed(*arguments)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("slurm --checkpoint.no_enable", "needs checkpoint.enable.*got .*False.*--max-rest"),
        ("slurm --nodes=2:3", "MIN:MAX.* is for kubernetes, jobset, torchrun, got '2:3' with sl"),
        ("jobset --nodes=3:2", "MIN at most MAX.*got '3:2'"),
        ("jobset --nodes=x", "--nodes must be a number, or MIN:MAX, got 'x'"),
        ("jobset --image= --volume=v", "pods need --image.*got none; build one"),
        ("jobset --image=i", "a folder that stays: --volume.*dump_folder = './outputs'"),
        (f"jobset PODS {SHARED}", "dump_folder in /work.*got --volume 'shared'.*'/shared'"),
        ("skypilot --volume=v --job.dump_folder=../run", "in /work.*got .*'../run'"),
        ("jobset PODS --checkpoint.folder=/c", "in /work.*checkpoint.folder = '/c'"),
        ("ray --job.dump_folder=s3://b/run", "got 's3://b/run'; set .* as checkpoint.folder"),
        ("skypilot", "machines of skypilot come and go.*--volume"),
        ("verl --config= --max-restarts=0", "verl has settings.*got --max-restarts = 0;"),
        ("verl --plan", "verl has settings of its own.*got --config = "),
        ("jobset PODS --nodes=3:4", "on 4 nodes of 8 ranks: .*multiple of .*got 48 with 1 . 32"),
        ("jobset PODS --nodes=2:3 --training.global_batch_size=-1", "elastic job needs trai"),
        ("jobset PODS --name=3b", "must begin with a letter.*got '3b'; give .* --name"),
        ("kubernetes PODS --servers=1", "--servers needs .*got kubernetes .* without .rl"),
        ("slurm --env=A", "--env must be NAME=VALUE, got 'A'"),
        ("torchrun", "torchrun needs --head"),
        ("ray", "ray copies the working folder.*got './outputs'"),
        ("slurm --config=none.toml", "--config must be the job's TOML file, got 'none.toml'"),
    ],
)
def test_job_that_the_engine_cannot_run_is_refused(arguments, message, job, capsys):
    engine, *options = arguments.replace("PODS", " ".join(PODS)).split()
    error = refusal(capsys, engine, f"--config={job}", "--nodes=3", *options)
    assert error.startswith("error: ")
    assert re.search(message, error), error


@pytest.mark.parametrize("engine", ["nomad", "--config=a.toml"])
def test_unknown_or_missing_engine_is_refused(engine, capsys):
    error = refusal(capsys, engine, "--nodes=1")
    assert re.fullmatch(f"error: ENGINE must be one of kubernetes, .*got '{engine}'.*\n", error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rl.generator.memory_share=0.8", "memory_share = 0.8 has no effect .*'openai'"),
        ("--rl.generator.rescore", "rl.generator.rescore would hide"),
        ("--rl.async_steps=1", "must not take weights while a rank draws.*async_steps = 1"),
        ("--rl.generator.exact", "exact generates .*rl.generator.backend = 'openai'"),
        (
            "--rl.generator.adapters --model.converters=lora",
            "--servers starts vLLM without .*got rl.generator.adapters = True",
        ),
        (f"--volume= {BUCKET}", "servers read weights in job.dump_folder.*got --volume ''"),
    ],
)
def test_servers_are_started_only_for_a_config_that_draws_from_them(
    arguments, message, rl_job, capsys
):
    options = ("jobset", f"--config={rl_job}", "--nodes=3", *PODS, "--servers=2")
    error = refusal(capsys, *options, *arguments.split())
    assert re.search(message, error), error


@pytest.mark.parametrize("engine", ["jobset", "skypilot", "ray"])
def test_checkpoints_in_a_bucket_need_no_volume(engine, job):
    assert BUCKET in printed(engine, f"--config={job}", "--nodes=3", "--image=i", BUCKET)
