"""What `torchtitan launch` prints for Ray, submitted to two Ray nodes on this machine."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples.verl.toy import make_toy
from tests.reliability import jobs
from tests.verl import cases

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900  # on a busy machine
TRAINING = """
training.global_batch_size = 4
metrics.enable_jsonl = true
checkpoint = {enable = true, interval = 100}
"""


@pytest.fixture(scope="module")
def cluster():
    """Yield the address to submit jobs to. Each node has 1 "GPU", so that two workers need two nodes.

    verl wants 3 cores of each node together, and has four actors of one core that may be anywhere.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Jobs run the `python` of the nodes.
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("RAY_raylet_start_wait_time_s", "300")  # read when ray is imported
        yield from two_nodes()


def two_nodes():
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 200 * 2**20}
    port = jobs.free_port()
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    nodes = Cluster(initialize_head=True, head_node_args=node | head)
    nodes.add_node(**node)
    yield f"http://127.0.0.1:{port}"
    nodes.shutdown()


def submit(cluster, folder, engine, *arguments):
    """Run what `torchtitan launch` prints, in the folder; return the job's output."""
    launch = [sys.executable, "-m", "torchtitan", "launch", engine, "--nodes=2", *arguments]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples/verl")])
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.register",
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # on a busy machine
    }
    launch += [f"--env={name}={value}" for name, value in variables.items()]
    env = os.environ | {"RAY_ADDRESS": cluster, "PYTHONPATH": path}
    command = subprocess.check_output(launch, env=env, cwd=folder, text=True)
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    done = subprocess.run(["bash", "-c", command], env=env, cwd=folder, **options)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.slow
def test_released_verl_makes_a_grpo_step_on_two_nodes(cluster, tmp_path):
    make_toy(tmp_path / "toy")
    example = ["bash", ROOT / "examples/verl/grpo.sh", tmp_path / "toy"]
    printed = subprocess.check_output(example, env=os.environ | {"PYTHON": "echo"}, text=True)
    settings = shlex.split(printed)[2:]
    # Ray runs already, and has the resources.
    resources = ("num_gpus", "num_cpus", "object_store_memory", "include_dashboard")
    settings += [f"ray_kwargs.ray_init.{name}=null" for name in resources]
    settings += ["trainer.nnodes=2", "trainer.total_training_steps=1"]
    settings += ["actor_rollout_ref.actor.torchtitan.data_parallel_shard_size=2"]
    (tmp_path / "files").mkdir()
    output = submit(cluster, tmp_path / "files", "verl", "--gpus-per-node=1", *settings)
    found = cases.logged_steps(output)[1]
    assert 0 < found["actor/grad_norm"] < 10
    assert found["training/rollout_probs_diff_max"] < 1e-6
    assert "torchtitan_server_1" in output  # the second node's rollout


@pytest.mark.slow
def test_ray_train_on_two_nodes_has_the_losses_of_one_process(cluster, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/job.toml").write_text(TRAINING)
    losses = {}
    for place in ("ray", "here"):
        job = [*jobs.TINY_JOB, f"--job.dump_folder={tmp_path / place}"]
        if place == "ray":
            options = ["--config=job.toml", "--gpus-per-node=0", "--cpus=5", "--max-restarts=0"]
            submit(cluster, tmp_path / "files", "ray", *options, *job)
        else:
            config = f"--job.config_file={tmp_path}/files/job.toml"
            subprocess.run([sys.executable, "-m", "torchtitan.train", config, *job], check=True)
        losses[place] = jobs.logged_steps(tmp_path / place)
    assert '"world_size": 2' in (tmp_path / "ray/events.jsonl").read_text()
    assert len(losses["ray"]) == 4
    for (_, found), (_, expected) in zip(losses["ray"], losses["here"], strict=True):
        assert found == pytest.approx(expected, rel=2e-5)
