"""Models with adapters that share passes over one base, driven without HTTP."""

import torch

from tests.distributed.layout_matrix import register_tiny
from tests.unit.rl.toy import toy_config
from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.policy import Policy
from torchtitan.integrations.tinker.types import AdamParams, Datum, ModelInput
from torchtitan.integrations.tinker.wire import ForwardBackwardRequest
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.snapshots import host_copy
from torchtitan.rl.types import SamplingConfig

TARGETS = "--lora.target_modules=all-linear,lm_head"
LORA = ("--model.converters=lora", "--lora.rank=8", "--lora.alpha=16", TARGETS)
LAYERS = ["self_attn", "mlp", "output"]
LOSSES = ("cross_entropy", "ppo", "importance_sampling", "cispo", "gspo", "dro")


EXPERTS = "one dense layer, one of experts"  # and shared experts


def model_flags(family: str) -> tuple[str, ...]:
    """Flags for a model of `layout_matrix`, or for rl_toy without a family."""
    return (f"--model.name={register_tiny(family)}", "--model.flavor=tiny") if family else ()


def data_of(model: int, step: int) -> list[Datum]:
    """Another number of sequences, of other lengths, for each model and step."""
    generator = torch.Generator().manual_seed(100 * model + step)
    data = []
    for _ in range(1 + (model + step) % 3):
        n = int(torch.randint(2, 20, (), generator=generator))
        tokens = torch.randint(0, 32, (n + 1,), generator=generator)
        inputs = {"target_tokens": tokens[1:], "weights": torch.rand(n, generator=generator)}
        if model % len(LOSSES):
            inputs["logprobs"] = -3.5 + torch.rand(n, generator=generator)
            inputs["advantages"] = torch.randn(n, generator=generator)
        data.append(Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs))
    return data


def request(model: int, step: int, **changes) -> ForwardBackwardRequest:
    values = {
        "model_id": str(model),
        "seq_id": step,
        "data": data_of(model, step),
        "loss_fn": LOSSES[model % len(LOSSES)],
        "loss_fn_config": {},
        "forward_only": False,
    }
    return ForwardBackwardRequest(**(values | changes))


def adapters_of(model: int) -> dict:
    layers = [name for i, name in enumerate(LAYERS) if model % 4 != i + 1]
    return {"seed": model, "rank": 1 + model % 8, "layers": layers}


def params_of(model: int) -> AdamParams:
    return AdamParams(learning_rate=1e-2 / (1 + model), grad_clip_norm=float(model % 2))


def metrics_of(outputs) -> list:
    """Metrics and log-probs of outputs, as plain values."""
    return [
        (output.metrics, [x["logprobs"].tolist() for x in output.loss_fn_outputs])
        for output in outputs
    ]


def train(
    folder: str,
    n_models: int,
    n_steps: int,
    flags=(),
    is_together=True,
    serve=(),
    family="",
    request_of=request,
) -> list:
    """[step][model] -> (metrics, log-probs), of models in one pass, or one model after another.

    family: see `model_flags`.
    """
    flags = (*model_flags(family), "--training.local_batch_size=8", *flags, *serve)
    config = toy_config(folder, *LORA, *flags)
    with LocalTrainingClient(config) as client:
        assert client.shares_passes
        policy = Policy(client, config)
        for model in range(n_models):
            policy.start_model(adapters_of(model), str(model))
        found = []
        for step in range(n_steps):
            items = [(str(model), request_of(model, step)) for model in range(n_models)]
            calls = [items] if is_together else [[item] for item in items]
            outputs = [output for call in calls for output in policy.forward_backward(call)]
            updates = policy.optim_step([(str(m), params_of(m)) for m in range(n_models)])
            norms = [update["grad_norm"] for update in updates]
            found.append(list(zip(metrics_of(outputs), norms, strict=True)))
        policy.close()
    return found


def sample(folder: str, n_models: int, flags=()) -> list:
    """(tokens, log-probs) of completions that the generator drew in one batch for several models."""
    config = toy_config(folder, *LORA, "--training.local_batch_size=8", *flags)
    with LocalTrainingClient(config) as client:
        policy, engine, weights = Policy(client, config), client._trainer.engine, []
        for model in range(n_models):
            policy.start_model(adapters_of(model), str(model))
            policy.forward_backward([(str(model), request(model, 0))])
            policy.optim_step([(str(model), AdamParams(learning_rate=0.05))])
            weights.append(host_copy(engine))
        models = [*range(n_models), *reversed(range(n_models))]
        prompts = [list(range(n + 1)) for n in range(len(models))]
        generator = LocalGenerator(engine, seed=0)
        with generator.with_adapters(weights, models):
            drawn = generator.generate(prompts, SamplingConfig(max_tokens=5), 2)
        policy.close()
    return [(completion.token_ids, completion.token_logprobs) for completion in drawn]


def largest_difference(found, expected) -> float:
    """The largest difference of two nests of numbers, relative to the larger of them and 1."""
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), [expected[key] for key in found]
    if isinstance(found, list | tuple):
        pairs = zip(found, expected, strict=True)
        return max((largest_difference(a, b) for a, b in pairs), default=0.0)
    return abs(found - expected) / max(abs(found), abs(expected), 1.0)
