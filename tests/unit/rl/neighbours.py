"""Every command of the server on one client's model, and the states of the other clients around it."""

import contextlib
import copy
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.rl.together import LORA, adapters_of, params_of, request, train
from tests.unit.rl.toy import toy_config
from torchtitan.distributed.dtensor import local_tensor
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.policy import BASE, Policy
from torchtitan.integrations.tinker.types import Datum, ModelInput, SamplingParams
from torchtitan.rl.snapshots import own_weights

ACTING, OTHERS = "0", ("1", "2")
# Commands that may fail and change their own model: its step fails, or its gradients are zeroed.
OF_STEPS = ("failed forward_backward", "failed one of two", "failed optim_step")
WRONG = Datum(ModelInput((1, 99)), {"target_tokens": [1, 2]})


@contextlib.contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Inside, the system refuses to write larger files, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_on_full_disk(folder: str, n_models: int, n_steps: int, flags=()) -> list:
    """As `train`, where states should wait in files, and the last rank's disk is full.

    The limit is below a state's 0.6 MiB, and above what the process logs into pytest's own file: a
    process whose output cannot be written ends.
    """
    is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    with files_of_at_most(256 * 1024) if is_last else contextlib.nullcontext():
        return train(folder, n_models, n_steps, flags, serve=("--rl.serve.max_host_mib=1",))


def _step(policy: Policy, model: str, step: int) -> None:
    policy.forward_backward([(model, request(int(model), step))])
    policy.optim_step([(model, params_of(int(model)))])


def _sample(policy: Policy, sampler: str, tokens=(1, 2, 3)) -> None:
    params = SamplingParams(max_tokens=2, stop=())
    policy.sample([(ModelInput(tokens), None)], sampler, (1, params, True, 0))


def _shared(policy: Policy, **changes) -> list:
    """Two models' calls in one pass; the second model is made and dropped."""
    policy.start_model(adapters_of(3), "3")
    results = policy.forward_backward([(ACTING, request(0, 2)), ("3", request(3, 2, **changes))])
    policy.optim_step([("3", params_of(3))])
    policy.drop_models(["3"])
    return results


def commands(saved: str, damaged: str) -> dict[str, Callable[[Policy], object]]:
    """Name -> command; those whose names begin with "failed" must raise or return an error.

    saved: a state of the acting model, of an earlier step. damaged: one that cannot be read.
    """
    wrong = {"data": [WRONG], "loss_fn": "cross_entropy"}
    missing = os.path.join(os.path.dirname(saved), "missing")

    def acting(**changes):
        return [(ACTING, request(0, 3, **changes))]

    return {
        "create": lambda p: p.start_model(adapters_of(4), "4"),
        "failed create": lambda p: p.start_model(adapters_of(5) | {"rank": "none"}, "5"),
        "unload": lambda p: p.drop_models(["4"]),
        "create from state": lambda p: p.load(saved, True, "3", 1),
        "unload it": lambda p: p.drop_models(["3"]),
        "failed create from state": lambda p: p.load(damaged, True, "3", 1),
        "forward": lambda p: p.forward_backward(acting(forward_only=True)),
        "failed forward": lambda p: p.forward_backward(acting(forward_only=True, **wrong)),
        "forward_backward": lambda p: p.forward_backward(acting()),
        "optim_step": lambda p: p.optim_step([(ACTING, params_of(0))]),
        "forward_backward of two": lambda p: _shared(p),
        "failed one of two": lambda p: _shared(p, **wrong),
        "failed load in mid-step": lambda p: p.load(missing, False, ACTING, 1),
        "failed forward_backward": lambda p: p.forward_backward(acting(**wrong)),
        "failed load after it": lambda p: p.load(damaged, False, ACTING, 1),
        "failed optim_step": lambda p: p.optim_step([(ACTING, params_of(0))]),
        "save": lambda p: p.save("again", False, ACTING),
        "failed save": lambda p: p.save("file/below", False, ACTING),
        "save for sampler": lambda p: p.snapshot("mine", ACTING),
        "sample": lambda p: _sample(p, "mine"),
        "sample of base": lambda p: _sample(p, BASE),
        "failed sample": lambda p: _sample(p, "none"),
        "load": lambda p: p.load(saved, False, ACTING, 1),
        "load with optimizer": lambda p: p.load(saved, True, ACTING, 1),
        "failed load": lambda p: p.load(damaged, False, ACTING, 1),
        "failed load with optimizer": lambda p: p.load(damaged, True, ACTING, 1),
        "sampler of a saved state": lambda p: p.open("saved", saved),
        "sample of it": lambda p: _sample(p, "saved"),
        "sample of the earlier one": lambda p: _sample(p, "mine"),
        "failed sampler of a saved state": lambda p: p.open("damaged", damaged),
    }


def bits_of(value: Any) -> Any:
    """A copy of a nest of dicts, lists and tensors; two copies are equal if every bit is."""
    if isinstance(value, dict):
        return {key: bits_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [bits_of(each) for each in value]
    if isinstance(value, torch.Tensor):
        flat = local_tensor(value).detach().flatten()
        return flat.dtype, flat.view(torch.uint8).numpy().tobytes()
    return copy.copy(value)


def state_of(policy: Policy, model: str) -> list:
    """What a waiting model has: names and bits of tensors, passes of the step, failure."""
    state = policy._waiting.get([model])[0]
    moments = [list(optimizer.values()) for optimizer in state.optimizers]
    found = bits_of([state.weights, state.gradients, moments])
    return [*found, state.passes, str(state.failure)]


def changes(folder: str, flags=()) -> list[str]:
    """Run every command; return which of them changed which model that it should have left alone.

    A failed command should leave its own model alone, too, but for the failure of a step.
    """
    config = toy_config(folder, *LORA, "--training.local_batch_size=8", *flags)
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    with LocalTrainingClient(config) as client:
        policy = Policy(client, config)
        for model in (ACTING, *OTHERS):
            policy.start_model(adapters_of(int(model)), model)
            _step(policy, model, 0)
        policy.save("saved", False, ACTING)
        policy.save("damaged", False, ACTING)
        states = Path(client.states_folder)
        if rank == 0:
            (states / "file").write_text("no folder")
            for part in (states / "damaged").glob("*.distcp"):
                part.write_bytes(part.read_bytes()[:-64])
        if dist.is_initialized():
            dist.barrier()
        for model in (ACTING, *OTHERS):
            _step(policy, model, 1)
            policy.forward_backward([(model, request(int(model), 2))])  # gradients of a step begun
        all_commands = commands(str(states / "saved"), str(states / "damaged"))
        for in_policy in ("", ACTING, OTHERS[0]):
            for name, command in all_commands.items():
                before = _all_states(policy, client)
                policy._use(in_policy)
                try:
                    result = command(policy)
                    errors = [x for x in result or () if isinstance(x, Exception)]
                except Exception as error:
                    errors = [error]
                if name.startswith("failed") and not errors:
                    found.append(f"{name} with {in_policy or 'the base'} in place: no error")
                assert name.startswith("failed") or not errors, (name, errors)
                after = _all_states(policy, client)
                own = {ACTING, "3", "4"} if not errors or name in OF_STEPS else set()
                found += [
                    f"{name} with {in_policy or 'the base'} in place: {model or 'the base'}"
                    for model in sorted(before.keys() - own)
                    if before[model] != after.get(model)
                ]
                if errors and (more := after.keys() - before.keys()):
                    found.append(f"{name} left {sorted(more)}")
            shutil.rmtree(states / "again", ignore_errors=True)
        policy.close()
    return found


def _all_states(policy: Policy, client: LocalTrainingClient) -> dict[str, list]:
    policy._use("")  # all models wait
    states = {model: state_of(policy, model) for model in list(policy._waiting._all)}
    return states | {"": bits_of(dict(own_weights(client._trainer.engine)))}
