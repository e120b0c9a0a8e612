"""An engine's state moves to host memory and back on one GPU."""

import pytest
import torch

from tests.gpu.test_around_training import digest_of
from tests.unit.test_engine import backward, make_engine


def step(engine, seed):
    return backward(engine, seed).item(), engine.optim_step().grad_norm.item()


FSDP = "--parallelism.always_fsdp=True"


@pytest.mark.parametrize("family", ["llama3", "qwen3"])  # the latter is tied
@pytest.mark.parametrize("sharded", [False, True])
def test_steps_after_a_stay_in_host_memory_are_the_same(family, sharded, tmp_path):
    flags = [f"--model.name={family}", "--debug.deterministic", *([FSDP] if sharded else [])]
    plain, engine = make_engine(tmp_path, *flags), make_engine(tmp_path, *flags)
    expected = [step(plain, seed) for seed in range(3)]
    found = [step(engine, 0)]
    exported = digest_of(engine)
    allocated = torch.cuda.memory_allocated()
    parameters = list(engine.model_parts[0].parameters())
    engine.to("cpu")
    n_bytes = sum(p.numel() * p.element_size() for p in parameters)
    assert allocated - torch.cuda.memory_allocated() > 2.9 * n_bytes  # weights and two moments
    assert all(p.device.type == "cpu" for p in parameters)
    with pytest.raises(RuntimeError, match="forward_backward_step needs model and grad on cuda"):
        step(engine, 1)
    engine.save(str(tmp_path / "away"))
    assert digest_of(engine) == exported
    engine.to("cuda")
    assert all(a is b for a, b in zip(engine.model_parts[0].parameters(), parameters, strict=True))
    found += [step(engine, seed) for seed in (1, 2)]
    assert found == expected
    assert engine.load(str(tmp_path / "away"))
    assert step(engine, 1) == expected[1]


def test_step_after_a_stay_that_a_client_arranged_itself_is_the_same(tmp_path):
    """Without `engine.to`: the FSDP module is moved, and tensors of the optimizers' state."""
    plain, engine = (make_engine(tmp_path, "--debug.deterministic", FSDP) for _ in range(2))
    expected = [step(plain, seed) for seed in range(2)]
    found = [step(engine, 0)]

    def move(device):
        for part in engine.model_parts:
            part.to(device)
        optimizers = engine.optimizers
        for parameter in (p for group in optimizers.param_groups for p in group["params"]):
            state = optimizers.state[parameter]
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device, non_blocking=True)
        torch.cuda.synchronize()

    move("cpu")
    assert {p.device.type for p in engine.model_parts[0].parameters()} == {"cpu"}
    assert {s["exp_avg"].device.type for s in engine.optimizers.state.values()} == {"cpu"}
    move("cuda")
    assert [*found, step(engine, 1)] == expected
