"""What `torchtitan launch` prints is what the engines read, and says no to jobs that they cannot run."""

import copy
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
RL = (
    JOB
    + """
[rl.generator]
backend = "openai"
url = "http://localhost:1"
model = "policy"
"""
)
SHARED = "--job.dump_folder=/shared"
PODS = ("--image=ghcr.io/me/titan:1", "--volume=shared")


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "My Job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def rl_job(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text(RL)
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
    kinds = [document["kind"] for document in found]
    # Kubeflow's webhook refuses a TrainJob whose runtime is not there yet.
    expected = {"kubernetes": ["ConfigMap", "ClusterTrainingRuntime", "TrainJob"]}
    assert kinds == expected.get(engine, ["ConfigMap", "JobSet"])
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
    hosts = [f"http://rl-server-0-{i}.rl:8000" for i in range(2)]
    assert (
        f"--rl.generator.url={','.join(hosts)}" in command and "-m torchtitan.rl.train" in command
    )


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
    path.write_text(
        printed("skypilot", f"--config={job}", "--nodes=3", "--image=titan", "--volume=v")
    )
    task = Task.from_yaml(str(path))
    (resources,) = task.resources
    assert task.num_nodes == 3 and resources.accelerators == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [STOPPED]


def test_ray_is_given_one_command_for_training_and_one_for_verl(job):
    words = shlex.split(printed("ray", f"--config={job}", "--nodes=3", "--env=A=b c", SHARED))
    assert words[:4] == ["ray", "job", "submit", "--working-dir"]
    assert words[words.index("--") + 1 :][:3] == ["python", "-m", "torchtitan.cluster.ray"]
    assert '"A": "b c"' in words[words.index("--runtime-env-json") + 1]
    words = shlex.split(printed("verl", "--nodes=2", "algorithm.adv_estimator=gae", "+a=1"))
    assert words[-3] == "trainer.n_gpus_per_node=8"
    assert words[-2:] == ["algorithm.adv_estimator=gae", "+a=1"]


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


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("slurm", ["--checkpoint.no_enable"], "needs checkpoint.enable.*got .*False.*--max-rest"),
        (
            "slurm",
            ["--nodes=2:3"],
            "MIN:MAX.* is for kubernetes, jobset, torchrun, got '2:3' with sl",
        ),
        ("jobset", ["--nodes=3:2"], "MIN at most MAX.*got '3:2'"),
        ("jobset", ["--nodes=x"], "--nodes must be a number, or MIN:MAX, got 'x'"),
        ("jobset", ["--image=", "--volume=v"], "pods need --image.*got none; build one"),
        ("jobset", ["--image=i"], "need a folder that stays: --volume.*got './outputs'"),
        ("skypilot", [], "machines of skypilot come and go.*--volume"),
        ("verl", ["--nodes=x"], "--nodes must be a number"),
        (
            "jobset",
            [*PODS, "--nodes=3:4"],
            "on 4 nodes of 8 ranks: .*multiple of .*got 48 with 1 . 32",
        ),
        (
            "jobset",
            [*PODS, "--nodes=2:3", "--training.global_batch_size=-1"],
            "elastic job needs trai",
        ),
        ("jobset", [*PODS, "--name=A_b"], "--name must be lower-case letters.*got 'A_b'"),
        (
            "kubernetes",
            [*PODS, "--servers=1"],
            "--servers starts vLLM .*got kubernetes .* without .rl",
        ),
        ("slurm", ["--env=A"], "--env must be NAME=VALUE, got 'A'"),
        ("torchrun", [], "torchrun needs --head"),
        ("ray", [], "ray runs a job in a copy of its folder.*got './outputs'"),
        ("slurm", ["--config=none.toml"], "--config must be the job's TOML file, got 'none.toml'"),
    ],
)
def test_job_that_the_engine_cannot_run_is_refused(engine, arguments, message, job, capsys):
    with pytest.raises(SystemExit) as exit_:
        printed(engine, f"--config={job}", "--nodes=3", *arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error


def test_unknown_engine_is_refused(capsys):
    with pytest.raises(SystemExit):
        printed("nomad", "--nodes=1")
    assert "ENGINE must be one of kubernetes, jobset" in capsys.readouterr().err
