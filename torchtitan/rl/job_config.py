"""The `[rl]` sections of a config, and the rules they have to obey.

Everything else keeps its place: the model, optimizer, schedule, layout and checkpoints of the
policy are in the sections that pre-training has, and `training.steps` counts optimizer steps.
Annotations must stay real types, as in `torchtitan.config.job_config`.
"""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.config import JobConfig as BaseJobConfig
from torchtitan.config.checks import ConfigError, check_choices
from torchtitan.rl.advantages import AdvantageEstimator
from torchtitan.rl.losses import loss_class, loss_from_config
from torchtitan.rl.tasks import find_reward_fn, task_names

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]


@dataclass
class RLTask:
    name: str = "sum_digits"
    """
    What the policy has to learn: sum_digits, copy, sort, jsonl (prompts from a file), or a task
    that the module of experimental.custom_import registers
    """

    num_min: int = 2
    """For sum_digits: how many numbers to add at least"""

    num_max: int = 2
    """For sum_digits: how many at most"""

    value_max: int = 9
    """For sum_digits: the largest number; the smallest is 0"""

    length: int = 3
    """For copy and sort: letters in the prompt"""

    num_letters: int = 8
    """For copy and sort: how many different letters there are, from a on; at most 26"""

    path: str = ""
    """For jsonl: a file with one JSON object per line"""

    eval_path: str = ""
    """For jsonl: such a file to evaluate on; empty takes the first lines of path"""

    prompt_key: str = "prompt"
    """For jsonl: the key of the prompt"""

    answer_key: str = "answer"
    """For jsonl: the key of the expected answer; lines without it expect an empty one"""

    reward_fn: str = ""
    """
    For jsonl: module:function, called with (completion text, expected answer), which returns
    the reward, a number
    """


@dataclass
class RLAdvantage:
    name: Literal["group_mean", "rloo", "none"] = "group_mean"
    """
    What a reward is compared with: the mean of its prompt's completions, the mean of the other
    ones (rloo), or nothing
    """

    std: bool = False
    """Divide by the standard deviation of the prompt's rewards; makes entropy fall early"""


@dataclass
class RLLoss:
    name: str = "grpo"
    """
    The policy loss: grpo, dapo, gspo, cispo, importance_sampling, cross_entropy, or one that
    the module of experimental.custom_import registers
    """

    clip_eps: float | None = None
    """For grpo: how far from 1 a ratio may go before it is clipped; None is 0.2"""

    ratio_clip_low: float | None = None
    """For dapo, gspo, cispo: how far below 1; None is the loss's own default"""

    ratio_clip_high: float | None = None
    """For dapo, gspo, cispo: how far above 1; None is the loss's own default"""

    max_log_ratio: float = 10.0
    """Log-ratios are clamped to plus and minus this, so that exp does not overflow"""

    agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one, always over the whole step"""

    norm: float = 0.0
    """The constant that seq-mean-token-sum-norm divides by, e.g. the longest completion"""

    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy; above 0 samples need ref_logprobs"""

    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence"""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus"""


@dataclass
class RLBatch:
    seq_len: int | None = None
    """Longest row, in tokens; None takes training.seq_len"""

    local_batch_size: int | None = None
    """Rows per data-parallel rank in one forward pass; None takes training.local_batch_size"""

    max_tokens_per_microbatch: int | None = None
    """Instead of a number of rows: as many as hold this many tokens, padding included"""

    packing: bool = False
    """
    Lay several samples into a row, which needs model.attn_mask_type = position_block_causal;
    otherwise each has a row of its own
    """

    pad_multiple: int = 1
    """
    Rows are as long as the longest sample of the step, rounded up to a multiple of this
    """


@dataclass
class RLGenerator:
    backend: Literal["local", "vllm"] = "local"
    """Sample with the trainer's own modules, or with vLLM, which has to be installed"""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the generator's weights; None is what the trainer's matrix products are in"""

    max_batch_size: int = 256
    """Completions that are drawn at the same time on one data-parallel rank"""

    rescore: bool = False
    """
    Take the log-probs of sampled tokens from a forward pass of the trainer instead of from
    cached decoding, so that they are bitwise those of the first forward-backward pass; for a
    generator with the trainer's own precision, whose distribution they stand for
    """


@dataclass
class RLSampling:
    temperature: float = 1.0
    """Divides the logits when completions are drawn, and when the trainer scores them"""

    top_p: float = 1.0
    """Has to be 1: the trainer cannot tell which tokens were left out"""

    top_k: int = 0
    """Has to be 0, for the same reason"""

    max_tokens: int = 16
    """Longest completion"""


@dataclass
class RLWeightSync:
    mode: Literal["auto", "reference", "broadcast"] = "auto"
    """
    How weights reach the generator: it shares the trainer's tensors, or gets copies by
    broadcast; auto shares where it can
    """

    digest: bool = True
    """Compare a digest of the weights on both sides at each update"""


@dataclass
class RL:
    num_prompts_per_step: int = 16
    """Prompts per optimizer step"""

    num_samples_per_prompt: int = 16
    """Completions of each prompt"""

    async_steps: int = 0
    """Generation may run ahead of training by so many steps; 0 takes turns"""

    eval_every: int = 0
    """Evaluate, greedy and sampled, every this many steps and after the last; 0 never"""

    eval_samples: int = 200
    """Prompts per evaluation, the same each time"""

    seed: int = 0
    """Seed of the prompts and of the sampling"""

    log_samples: int = -1
    """Episodes per step that are appended to episodes.jsonl; -1 is all, 0 none"""

    task: RLTask = field(default_factory=RLTask)
    """Prompts and rewards"""

    advantage: RLAdvantage = field(default_factory=RLAdvantage)
    """From rewards to advantages"""

    loss: RLLoss = field(default_factory=RLLoss)
    """The policy loss and how it is summed"""

    batch: RLBatch = field(default_factory=RLBatch)
    """How samples are laid into rows"""

    generator: RLGenerator = field(default_factory=RLGenerator)
    """What draws completions"""

    sampling: RLSampling = field(default_factory=RLSampling)
    """How completions are drawn for training"""

    weight_sync: RLWeightSync = field(default_factory=RLWeightSync)
    """How weights reach the generator"""


@dataclass
class JobConfig(BaseJobConfig):
    """A pre-training job's config and the `[rl]` sections.

    Also what `--job.custom_config_module torchtitan.rl.job_config` merges in.
    """

    rl: RL = field(default_factory=RL)


def batch_seq_len(job_config: JobConfig) -> int:
    """Longest row of a batch, in tokens."""
    own = job_config.rl.batch.seq_len
    return job_config.training.seq_len if own is None else own


def batch_rows(job_config: JobConfig) -> int:
    """Rows per data-parallel rank in one forward pass."""
    own = job_config.rl.batch.local_batch_size
    return job_config.training.local_batch_size if own is None else own


# --- Rules, one function each -----------------------------------------------------------------


def check_rl_config(job_config: JobConfig) -> None:
    """Raise ConfigError at the first rule the `[rl]` sections break.

    The other sections are checked when the engine is built.
    """
    check_trainer_config(job_config)
    check_advantage(job_config)
    check_task(job_config)
    check_rewards_count(job_config)
    check_sampling(job_config)
    check_completions_fit(job_config)
    check_generator(job_config)
    check_rescore(job_config)


def check_trainer_config(job_config: JobConfig) -> None:
    """The same for what a `PolicyTrainer` alone goes by: no tasks, no sampling."""
    check_choices(job_config)
    check_counts(job_config)
    check_numbers(job_config)
    check_aggregation(job_config)
    check_loss(job_config)
    check_rows(job_config)
    check_packing(job_config)
    check_sequence_ratio(job_config)
    check_gradients_add_up(job_config)


_LARGEST_COUNT = 10**9
_SMALLEST_COUNTS: dict[str, int] = {
    "num_prompts_per_step": 1,
    "num_samples_per_prompt": 1,
    "async_steps": 0,
    "eval_every": 0,
    "eval_samples": 1,
    "seed": 0,
    "log_samples": -1,
    "batch.seq_len": 2,
    "batch.local_batch_size": 1,
    "batch.max_tokens_per_microbatch": 1,
    "batch.pad_multiple": 1,
    "generator.max_batch_size": 1,
    "sampling.max_tokens": 1,
}


def check_counts(job_config: JobConfig) -> None:
    for key, smallest in _SMALLEST_COUNTS.items():
        value = _value(job_config.rl, key)
        if value is not None and value < smallest:
            raise ConfigError(
                f"rl.{key} must be at least {smallest}, got {value}; "
                f"the default is {_value(RL(), key)}"
            )
        if value is not None and key != "seed" and value > _LARGEST_COUNT:
            raise ConfigError(
                f"rl.{key} must be at most {_LARGEST_COUNT}, got {value}; "
                f"the default is {_value(RL(), key)}"
            )


def check_numbers(job_config: JobConfig) -> None:
    for key in (
        "clip_eps",
        "ratio_clip_low",
        "ratio_clip_high",
        "max_log_ratio",
        "norm",
        "kl_coef",
        "entropy_coef",
    ):
        value = getattr(job_config.rl.loss, key)
        # Written so that nan, which compares false with everything, fails too.
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(
                f"rl.loss.{key} must be a finite number of at least 0, got {value}; "
                f"the default is {getattr(RLLoss(), key)}"
            )


def check_advantage(job_config: JobConfig) -> None:
    """One completion equals the mean of its group: nothing would ever be learned."""
    rl = job_config.rl
    try:
        AdvantageEstimator.of(rl.advantage)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if rl.advantage.name != "none" and rl.num_samples_per_prompt < 2:
        raise ConfigError(
            f"rl.advantage.name = {rl.advantage.name!r} compares completions of one prompt, got "
            f"rl.num_samples_per_prompt = {rl.num_samples_per_prompt}; set it to 2 or more, or "
            f"rl.advantage.name to 'none'"
        )


def check_task(job_config: JobConfig) -> None:
    task = job_config.rl.task
    if task.name not in task_names():
        raise ConfigError(
            f"rl.task.name must be one of {', '.join(task_names())}, got {task.name!r}; correct "
            f"it, or register it in the module that experimental.custom_import names"
        )
    if task.name == "sum_digits":
        _check_range("rl.task.num_min", task.num_min, 1, task.num_max, "rl.task.num_max")
        _check_range("rl.task.value_max", task.value_max, 1)
    elif task.name in ("copy", "sort"):
        _check_range("rl.task.length", task.length, 1)
        _check_range("rl.task.num_letters", task.num_letters, 1, 26, "the alphabet")
    elif task.name == "jsonl":
        check_prompt_files(job_config)


def check_prompt_files(job_config: JobConfig) -> None:
    task = job_config.rl.task
    for key in ("path", "eval_path"):
        path = getattr(task, key)
        if not os.path.isfile(path) and (path or key == "path"):
            raise ConfigError(
                f"rl.task.{key} must be a file with one JSON object per line for rl.task.name = "
                f"'jsonl', got {path!r} (looked in {os.getcwd()}); correct the path"
            )
    try:
        find_reward_fn(task.reward_fn)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_range(
    key: str, value: int, smallest: int, largest: int | None = None, limit: str = ""
) -> None:
    if value < smallest or (largest is not None and value > largest):
        upper = "" if largest is None else f" and at most {largest} ({limit})"
        raise ConfigError(
            f"{key} must be at least {smallest}{upper}, got {value}; choose another number"
        )


def check_aggregation(job_config: JobConfig) -> None:
    loss = job_config.rl.loss
    needs_norm = loss.agg_mode == "seq-mean-token-sum-norm"
    if needs_norm and not loss.norm > 0:
        raise ConfigError(
            f"rl.loss.agg_mode = 'seq-mean-token-sum-norm' divides by the constant rl.loss.norm, "
            f"got {loss.norm}; set it, for instance to rl.sampling.max_tokens = "
            f"{job_config.rl.sampling.max_tokens}"
        )
    if loss.norm and not needs_norm:
        raise ConfigError(
            f"rl.loss.norm = {loss.norm} is read by agg_mode 'seq-mean-token-sum-norm' alone, got "
            f"{loss.agg_mode!r}; take one of them out"
        )


def check_loss(job_config: JobConfig) -> None:
    loss = job_config.rl.loss
    if loss.max_log_ratio == 0:
        raise ConfigError(
            "rl.loss.max_log_ratio must be above 0, got 0, which makes every ratio 1; "
            "the default is 10"
        )
    try:
        loss_from_config(loss)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_sampling(job_config: JobConfig) -> None:
    """The log-probs that the ratio divides by have to be of the distribution sampled from."""
    sampling = job_config.rl.sampling
    if not 0 < sampling.temperature < math.inf:
        raise ConfigError(
            f"rl.sampling.temperature must be above 0, got {sampling.temperature}; greedy decoding "
            f"has no log-probs to learn from, and evaluation is greedy anyway"
        )
    for key, keeps_all in (("top_p", 1.0), ("top_k", 0)):
        if getattr(sampling, key) != keeps_all:
            raise ConfigError(
                f"rl.sampling.{key} must be {keeps_all} in training, because the trainer scores "
                f"tokens over the whole vocabulary and not over those that were kept, got "
                f"{getattr(sampling, key)}; lower rl.sampling.temperature instead"
            )


def check_rows(job_config: JobConfig) -> None:
    batch, training = job_config.rl.batch, job_config.training
    seq_len = batch_seq_len(job_config)
    if seq_len > training.seq_len:
        raise ConfigError(
            f"rl.batch.seq_len must not be above training.seq_len, which sets how many positions "
            f"the model knows, got {seq_len} with {training.seq_len}; raise training.seq_len"
        )
    if seq_len % batch.pad_multiple:
        raise ConfigError(
            f"rl.batch.pad_multiple must divide the row length {seq_len}, got "
            f"{batch.pad_multiple}; change it, or rl.batch.seq_len"
        )
    limit = batch.max_tokens_per_microbatch
    if limit is not None and batch.local_batch_size is not None:
        raise ConfigError(
            f"rl.batch.local_batch_size and rl.batch.max_tokens_per_microbatch both set the rows "
            f"of a microbatch, got {batch.local_batch_size} and {limit}; take one of them out"
        )
    if limit is not None and limit < seq_len:
        raise ConfigError(
            f"rl.batch.max_tokens_per_microbatch must hold a row of {seq_len} tokens, got {limit}; "
            f"raise it, or lower rl.batch.seq_len"
        )


def check_completions_fit(job_config: JobConfig) -> None:
    seq_len, max_tokens = batch_seq_len(job_config), job_config.rl.sampling.max_tokens
    if max_tokens >= seq_len:
        raise ConfigError(
            f"rl.sampling.max_tokens must leave room for the prompt in rows of {seq_len} tokens, "
            f"got {max_tokens}; lower it, or raise training.seq_len"
        )


def check_packing(job_config: JobConfig) -> None:
    mask_type = job_config.model.attn_mask_type
    if job_config.rl.batch.packing and mask_type != "position_block_causal":
        raise ConfigError(
            f"rl.batch.packing keeps the samples of a row apart by their positions, got "
            f"model.attn_mask_type = {mask_type!r}; set it to 'position_block_causal' with "
            f"model.attn_type = 'flex' or 'varlen', or turn packing off"
        )


def check_sequence_ratio(job_config: JobConfig) -> None:
    cp, name = job_config.parallelism.context_parallel_degree, job_config.rl.loss.name
    if loss_class(name).needs_whole_sequences and cp > 1:
        raise ConfigError(
            f"rl.loss.name = {name!r} takes a ratio over whole sequences, which context parallelism "
            f"splits, got parallelism.context_parallel_degree = {cp}; set it to 1, or take 'grpo'"
        )


def check_generator(job_config: JobConfig) -> None:
    """Weights can be shared by a generator in this process that stops while they change."""
    rl = job_config.rl
    if rl.weight_sync.mode != "reference":
        return
    for key, value, fits in (
        ("rl.generator.backend", rl.generator.backend, rl.generator.backend == "local"),
        ("rl.async_steps", rl.async_steps, rl.async_steps == 0),
    ):
        if not fits:
            raise ConfigError(
                f"rl.weight_sync.mode = 'reference' shares the trainer's weights, which does not "
                f"go with {key} = {value!r}; set the mode to 'broadcast' or 'auto'"
            )


def check_rescore(job_config: JobConfig) -> None:
    rl = job_config.rl
    if rl.generator.rescore and rl.async_steps:
        raise ConfigError(
            f"rl.generator.rescore takes log-probs from today's weights, and with rl.async_steps = "
            f"{rl.async_steps} episodes are drawn with earlier ones; turn one of them off"
        )
    if rl.generator.rescore and rl.generator.backend != "local":
        raise ConfigError(
            f"rl.generator.rescore would hide how far rl.generator.backend = "
            f"{rl.generator.backend!r} samples from the trainer's policy, and every ratio would be "
            "1; turn rescore off"
        )


def check_rewards_count(job_config: JobConfig) -> None:
    name = job_config.rl.loss.name
    if not loss_class(name).has_generator:
        raise ConfigError(
            f"rl.loss.name = {name!r} reads no rewards, so nothing would be reinforced; take 'grpo', "
            "or give this loss to PolicyTrainer.forward_backward with batches of your own"
        )


def check_gradients_add_up(job_config: BaseJobConfig) -> None:
    """A batch's weights are shares of the whole optimizer step."""
    reduction = job_config.training.gradient_reduction
    if reduction != "sum":
        raise ConfigError(
            f"in RL gradients of all ranks have to be added up, as tokens are weighted over all of "
            f"them, got training.gradient_reduction = {reduction!r}; set it to 'sum'"
        )
    if job_config.optimizer.early_step_in_backward:
        raise ConfigError(
            "in RL gradients add up until optim_step, got optimizer.early_step_in_backward = true, "
            "which updates weights in every backward pass; set it to false"
        )


def _value(section: Any, key: str) -> Any:
    for name in key.split("."):
        section = getattr(section, name)
    return section
