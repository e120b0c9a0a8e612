"""Runs engines as verl's trainers do: whole batches go to groups of Ray processes.

One process and two, in which all layouts of actor and critic live side by side. verl splits a
batch over the ranks that read different data and joins what comes back.
"""

import os
from functools import partial

import pytest
import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from tests.verl import cases

MODEL_TYPES = {"actor": "language_model", "critic": "value_model"}
LOSSES = {"actor": "ppo", "critic": "value"}


class WorkerWithWeights(TrainingWorker):
    """verl's worker, with a method that returns weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self):
        return {name: tensor.clone() for name, tensor in self.engine.get_per_tensor_param()[0]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """role -> folder."""
    folder = str(tmp_path_factory.mktemp("models"))
    return {
        role: cases.save_model(folder, "qwen3", is_critic=role == "critic") for role in MODEL_TYPES
    }


@pytest.fixture(scope="module")
def references(folders):
    return {role: cases.reference(folder, LOSSES[role]) for role, folder in folders.items()}


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=6,  # three processes of `groups`, and three of `adapter_records`
        include_dashboard=False,
        object_store_memory=2**27,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
    )
    yield
    ray.shutdown()


def start_groups(configs):
    """(role, layout) -> verl's handle of its workers. configs: role -> config of the layout's sizes."""
    handles = {}
    for n_ranks in (1, 2):
        layouts = {name: x for name, x in cases.LAYOUTS.items() if (n_ranks == 2) == bool(x)}
        remote_worker = ray.remote(WorkerWithWeights)
        workers = {
            f"{role}_{layout}": RayClassWithInitArgs(remote_worker, config_of(**sizes))
            for role, config_of in configs.items()
            for layout, sizes in layouts.items()
        }
        processes = RayWorkerGroup(
            resource_pool=RayResourcePool([n_ranks], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=create_colocated_worker_cls(workers),
        )
        for name, group in processes.spawn(prefix_set=workers.keys()).items():
            group.reset()
            handles[tuple(name.split("_"))] = group
    return handles


@pytest.fixture(scope="module")
def groups(cluster, folders):
    return start_groups(
        {
            role: partial(cases.worker_config, folders[role], model_type)
            for role, model_type in MODEL_TYPES.items()
        }
    )


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("role", MODEL_TYPES)
def test_weights_scores_and_steps_are_those_of_transformers(
    groups, folders, references, role, layout
):
    group, kind = groups[role, layout], LOSSES[role]
    model = cases.load_model(folders[role], is_critic=role == "critic")
    for weights in group.weights():  # one dict per process
        assert weights.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(weights[name], tensor), name

    with torch.no_grad():
        compute = cases.values_of if role == "critic" else cases.outputs_of
        before = cases.samples_of(compute(model, cases.make_batch(0)))
    cases.assert_same_outputs(infer(group), before)

    group.set_loss_fn(cases.loss_of(kind))
    steps = [group.train_batch(cases.batch_of(kind, step)).get() for step in range(cases.STEPS)]
    metrics = [tu.get(output, "metrics") for output in steps]
    losses, norms = ([m[name] for m in metrics] for name in ("loss", "grad_norm"))
    cases.assert_same_run(cases.Record(losses, norms, infer(group)), references[role])


def infer(group):
    """name -> outputs for each sample of a whole batch, in its order."""
    data = cases.make_batch(0, calculate_entropy=True, compute_loss=False)
    return cases.samples_of(group.infer_batch(data).get())
