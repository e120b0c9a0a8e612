"""Tiny models, batches as verl has them, and a plain Hugging Face loop to compare with.

S samples, P prompt tokens, R response tokens, j tokens of one sample.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import peft
import torch
import transformers
from tensordict import TensorDict
from torch.nn import functional as F
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    HFModelConfig,
    TorchtitanOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from tests.reliability.jobs import free_port
from tests.tiny_hf import VOCAB, tiny_hf_model
from torchtitan.integrations.verl.config import EngineConfig
from torchtitan.testing.gloo import run_ranks

STEPS, SAMPLES = 3, 8
# A sample that sees another sample moves log-probabilities by 1e-2; rounding moves them by 1e-6.
MAX_DIFFERENCE, MAX_RELATIVE = 5e-6, 5e-6
LR, EPS, CLIP = 1e-3, 1e-3, 0.5  # without EPS, AdamW turns rounding errors into full steps
LAYOUTS = {
    "one": {},
    "fsdp": {"data_parallel_shard_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
}


# ---- models ----


def save_model(folder: str, family: str, is_critic: bool = False, **changes: Any) -> str:
    """Write a model of `tests.tiny_hf`; returns its folder. changes: of its config."""
    path = os.path.join(folder, "_".join([family, "critic" * is_critic, *map(str, changes)]))
    tiny_hf_model(family, is_critic=is_critic, **changes).save_pretrained(path)
    return path


def load_model(folder: str, is_critic: bool = False) -> Any:
    auto = transformers.AutoModelForCausalLM
    if is_critic:
        auto = transformers.AutoModelForTokenClassification
    return auto.from_pretrained(folder, attn_implementation="eager").float()


# ---- batches ----


def jagged(samples: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(samples), layout=torch.jagged)


def make_batch(seed: int, /, n_alike: int = 1, **settings: Any) -> TensorDict:
    """`SAMPLES` prompts and responses with what `sft_loss` and `ppo_loss` read, as trainers have it.

    n_alike: the number of first samples with one prompt and one first token of the response.
    settings: non-tensor entries over the usual ones.
    """
    random = torch.Generator().manual_seed(seed)
    prompt, response = 9, 12

    def randint(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    prompt_lengths, response_lengths = randint(2, prompt, SAMPLES), randint(1, response, SAMPLES)
    prompt_lengths[:n_alike] = prompt_lengths[0].clone()
    is_prompt = torch.arange(prompt) >= prompt - prompt_lengths[:, None]
    response_mask = (torch.arange(response) < response_lengths[:, None]).long()
    attention_mask = torch.cat((is_prompt.long(), response_mask), dim=1)
    input_ids = randint(1, VOCAB, SAMPLES, prompt + response) * attention_mask
    input_ids[:n_alike, : prompt + 1] = input_ids[0, : prompt + 1].clone()
    data = TensorDict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "prompts": input_ids[:, :prompt],
            "responses": input_ids[:, prompt:],
            "response_mask": response_mask,
            "old_log_probs": -4.0 + 0.3 * randn(SAMPLES, response),
            "ref_log_prob": -4.0 + 0.3 * randn(SAMPLES, response),
            "advantages": randn(SAMPLES, response),
            "values": randn(SAMPLES, response),
            "returns": randn(SAMPLES, response),
        },
        batch_size=SAMPLES,
    )
    data = left_right_2_no_padding(data)
    # SFT has a mask over whole samples, PPO one over responses.
    values = {
        "temperature": 1.0,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "global_batch_size": SAMPLES,
        "update_lr_scheduler": True,
    }
    for key, value in (values | settings).items():
        if isinstance(value, torch.Tensor):
            data[key] = value
        else:
            tu.assign_non_tensor(data, **{key: value})
    return data


def batch_of_samples(samples: list[torch.Tensor], **settings: Any) -> TensorDict:
    """A batch of whole samples, tokens [j] each, the second half of which is learned by `sft_loss`."""
    columns = {
        "input_ids": samples,
        "position_ids": [torch.arange(len(x)) for x in samples],
        "loss_mask": [(torch.arange(len(x)) >= len(x) // 2).long() for x in samples],
    }
    columns = {name: jagged(tensors) for name, tensors in columns.items()}
    data = TensorDict(columns, batch_size=len(samples))
    values = dict(temperature=1.0, use_dynamic_bsz=True, max_token_len_per_gpu=256)
    tu.assign_non_tensor(data, **values | settings)
    return data


def as_sft(data: TensorDict) -> TensorDict:
    """The batch with a loss mask over whole samples, jagged."""
    pairs = zip(data["input_ids"].unbind(), data["response_mask"].sum(1), strict=True)
    data["loss_mask"] = jagged((torch.arange(len(x)) >= len(x) - n).long() for x, n in pairs)
    return data


def share_of(data: TensorDict, engine: Any) -> TensorDict:
    """The share of a batch that this data-parallel rank gets."""
    shares = tu.chunk_tensordict(data, engine.get_data_parallel_size())
    return shares[engine.get_data_parallel_rank()]


def actor_config(**changes: Any) -> ActorConfig:
    values = dict(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, rollout_n=1)
    values |= dict(strategy="torchtitan", ppo_micro_batch_size_per_gpu=SAMPLES)
    return ActorConfig(**values | changes)


def loss_of(kind: str) -> Any:
    """A loss of verl's: "sft", "ppo" with entropy bonus and KL, or "value"."""
    if kind == "sft":
        return partial(sft_loss, config=None)
    if kind == "ppo":
        return partial(ppo_loss, config=actor_config())
    settings = dict(ppo_micro_batch_size_per_gpu=SAMPLES, cliprange_value=0.5)
    return partial(value_loss, config=CriticConfig(strategy="torchtitan", **settings))


def batch_of(kind: str, step: int, **settings: Any) -> TensorDict:
    """The batch of a step; PPO asks for entropies."""
    data = make_batch(step, **{"calculate_entropy": kind == "ppo", **settings})
    return as_sft(data) if kind == "sft" else data


# ---- the plain loop ----


@dataclasses.dataclass
class Record:
    """losses, norms: of every step. outputs: of the first step's batch, after the last step."""

    losses: list[float]
    norms: list[float]
    outputs: dict[str, list[torch.Tensor]]


def values_of(model: Any, data: TensorDict) -> dict[str, torch.Tensor]:
    """Jagged values of a Hugging Face critic that sees single samples."""
    rows = data["input_ids"].unbind()
    return {"values": jagged(model(tokens[None]).logits[0, :, 0] for tokens in rows)}


def outputs_of(model: Any, data: TensorDict) -> dict[str, torch.Tensor]:
    """Jagged log-probabilities and entropies of a Hugging Face model that sees single samples."""
    temperature = torch.as_tensor(tu.get_non_tensor_data(data, "temperature", 1.0))
    temperatures = temperature.expand(len(data)).tolist()
    log_probs, entropies = [], []
    for tokens, t in zip(data["input_ids"].unbind(), temperatures, strict=True):
        log_p = F.log_softmax(model(tokens[None]).logits[0] / t, dim=-1)
        of_tokens = log_p[:-1].gather(1, tokens[1:, None])[:, 0]
        log_probs.append(F.pad(of_tokens, (0, 1)))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return {"log_probs": jagged(log_probs), "entropy": jagged(entropies)}


def reference(folder: str, kind: str, adapters: str | None = None, **settings: Any) -> Record:
    """Train the model of a folder for `STEPS` steps, the whole batch at once.

    adapters: a folder of adapters, which train in place of the model, by the library `peft`.
    """
    model, loss_function = load_model(folder, kind == "value"), loss_of(kind)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
    compute = values_of if kind == "value" else outputs_of
    # With linear attention our optimizer by default exempts its decay and all norms.
    names = [name for name, _ in model.named_parameters()]
    exempt = ("A_log", "dt_bias", "norm.weight") if any("A_log" in n for n in names) else ()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith(exempt) == is_exempt]}
        | {"weight_decay": 0.0 if is_exempt else 0.1}
        for is_exempt in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=EPS)
    record = Record([], [], {})
    for step in range(STEPS):
        data = batch_of(kind, step, **settings)
        mask = data["loss_mask"]
        num_tokens = (mask.values() if mask.is_nested else mask).sum().item()
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens)
        outputs = compute(model, data)
        if kind == "sft":
            del outputs["entropy"]
        loss, _ = loss_function(model_output=outputs, data=data, dp_group=None)
        loss.backward()
        record.losses.append(loss.item())
        record.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs = compute(model, batch_of(kind, 0, **settings))
    record.outputs = samples_of(outputs)
    return record


# ---- the engine ----


def on_ranks(n_ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of `work(*arguments)` on the ranks of a new job."""
    return run_ranks(work, n_ranks, *arguments, timeout_seconds=300)


def engine_config(**changes: Any) -> EngineConfig:
    values = dict(dtype="float32", use_torch_compile=False, activation_checkpoint="none")
    return EngineConfig(**{**values, **changes})


def optimizer_config(**changes: Any) -> TorchtitanOptimizerConfig:
    values = dict(lr=LR, eps=EPS, betas=(0.9, 0.99), weight_decay=0.1, clip_grad=CLIP)
    return TorchtitanOptimizerConfig(**{**values, "min_lr_factor": 1.0, **changes})


def pretend_torchrun(patch: Any) -> None:
    """Set the variables that verl's worker reads in a single process, too."""
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost")
    for name, value in (alone | dict(MASTER_PORT=str(free_port()))).items():
        patch.setenv(name, value)


def worker_config(
    folder: str,
    model_type: str = "language_model",
    *,
    optim: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **engine: Any,
) -> TrainingWorkerConfig:
    """The config of verl's worker. engine: fields of the engine's config."""
    return TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(path=folder, load_tokenizer=False, **(model or {})),
        engine_config=engine_config(**engine),
        optimizer_config=None if engine.get("forward_only") else optimizer_config(**(optim or {})),
        checkpoint_config=CheckpointConfig(**(checkpoint or {})),
    )


def make_worker(*args: Any, **kwargs: Any) -> TrainingWorker:
    """verl's worker around our engine, initialized; arguments are those of `worker_config`."""
    worker = TrainingWorker(worker_config(*args, **kwargs))
    worker.reset()
    return worker


def train(
    worker: TrainingWorker, kind: str, steps: range = range(STEPS), **settings: Any
) -> Record:
    """Train as the plain loop does; on ranks without outputs the lists are empty."""
    worker.set_loss_fn(loss_of(kind))
    record = Record([], [], {})
    for step in steps:
        output = worker.train_batch(share_of(batch_of(kind, step, **settings), worker.engine))
        if output is not None:
            metrics = tu.get(output, "metrics")
            record.losses.append(metrics["loss"])
            record.norms.append(metrics["grad_norm"])
    record.outputs = score(worker, batch_of(kind, 0, **{**settings, "calculate_entropy": True}))
    return record


def score(worker: TrainingWorker, data: TensorDict) -> dict[str, list[torch.Tensor]]:
    """Outputs for this rank's share of a batch, under verl's names."""
    data = share_of(data, worker.engine)
    tu.assign_non_tensor(data, compute_loss=False)
    output = worker.infer_batch(data)
    return {} if output is None else samples_of(output)


def samples_of(output: TensorDict | dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The jagged tensors of an output by name, sample by sample."""
    names = [name for name in output.keys() if isinstance(output[name], torch.Tensor)]
    return {name: [x.clone() for x in output[name].unbind()] for name in names}


def logged_steps(output: str) -> dict[int, dict[str, float]]:
    """{step: {metric: value}} of what verl's trainers print."""
    metrics: dict[int, dict[str, float]] = {}
    for step, line in re.findall(r"step:(\d+) - (.*)", output):
        pairs = re.findall(r"(\S+):([-+\d.e]+)", line)
        metrics.setdefault(int(step), {}).update((name, float(value)) for name, value in pairs)
    return metrics


def assert_same_run(record: Record, expected: Record) -> None:
    """Raise AssertionError unless a run equals that of the plain loop up to rounding."""
    torch.testing.assert_close(record.losses, expected.losses, rtol=MAX_RELATIVE, atol=5e-7)
    torch.testing.assert_close(record.norms, expected.norms, rtol=MAX_RELATIVE, atol=0)
    assert_same_outputs(record.outputs, expected.outputs)


def assert_same_outputs(
    outputs: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]
) -> None:
    assert outputs.keys() == expected.keys()
    for name, samples in expected.items():
        for ours, theirs in zip(outputs[name], samples, strict=True):
            # The last token of a sample predicts nothing.
            difference = (ours - theirs)[: -1 if name == "log_probs" else None].abs()
            assert not difference.numel() or difference.max() <= MAX_DIFFERENCE, name
