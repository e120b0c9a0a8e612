"""Rules that the `[rl]` sections have to obey; see `torchtitan.config.checks` for their form."""

import ipaddress
import math
import os
import re
from collections.abc import Iterator, Sequence

from torchtitan.config import JobConfig as BaseJobConfig
from torchtitan.config.checks.common import problem_in, refuse, value_of
from torchtitan.config.checks.values import choices
from torchtitan.rl.advantages import GAE, AdvantageEstimator
from torchtitan.rl.job_config import RL, JobConfig, RLServe, batch_seq_len
from torchtitan.rl.losses import loss_class, loss_from_config
from torchtitan.rl.tasks import chat_variables, find_function, task_builder
from torchtitan.tools.errors import ConfigError


def check_rl_config(job_config: JobConfig) -> None:
    """Raise ConfigError at the first rule the `[rl]` sections break.

    The other sections are checked when the engine is built.
    """
    check_trainer_config(job_config)
    refuse(
        _rewards(job_config),
        _task(job_config),
        _sampling(job_config),
        _generator(job_config),
        weight_sharing(job_config.rl),
        rescoring(job_config.rl),
    )


def check_trainer_config(job_config: JobConfig) -> None:
    """The same for the keys that a `PolicyTrainer` reads: no tasks, no sampling."""
    refuse(
        choices(job_config),
        _policy(job_config),
        _numbers(job_config),
        _loss(job_config),
        _rows(job_config),
    )
    check_gradients_add_up(job_config)


def check_not_divided(job_config: JobConfig) -> None:
    """Raise ConfigError if the job's ranks have roles, and what is built on them does not know."""
    if job_config.ranks_apart:
        refuse(
            [
                f"rl.generator.ranks = {job_config.ranks_apart} divides the job's ranks before there "
                "is a Controller, PolicyTrainer or client on them; start with torchtitan.rl.train "
                "or rl.controller.build_part, or set it to 0"
            ]
        )


def check_server_config(job_config: JobConfig) -> None:
    """The same for the keys that `torchtitan.rl.serve` reads."""
    check_trainer_config(job_config)
    refuse(_serve(job_config), weight_sharing(job_config.rl))


def _serve(job_config: JobConfig) -> Iterator[str]:
    serve = job_config.rl.serve
    try:
        ipaddress.ip_address(serve.host)
    except ValueError:
        yield f"rl.serve.host must be an IP address, got {serve.host!r}; 127.0.0.1 is this machine"
    if not 0 <= serve.port < 2**16:
        yield f"rl.serve.port must be 0 to 65535, got {serve.port}; the default is 8000"
    if not serve.base_model:
        yield "rl.serve.base_model must be a name, got ''; the default is 'policy'"
    if wrong := [name for name in serve.names if not re.fullmatch(r"[a-z0-9._-]+", name)]:
        yield (
            f"rl.serve.names must be host names in lower case, without ports, got {wrong[0]!r}; "
            "such as 'trainer.example.org'"
        )
    api_key(serve)
    for key in ("rescore", "in_flight"):
        if getattr(job_config.rl.generator, key):
            yield f"rl.generator.{key} is for training by the config's own loop; turn it off"
    if job_config.rl.async_steps:
        yield (
            f"rl.async_steps is for training by the config's own loop, got "
            f"{job_config.rl.async_steps}; clients decide by themselves how far they run ahead"
        )


def api_key(serve: RLServe) -> str:
    """The key that the server's clients have to send; "" for none. Raises ConfigError."""
    path, key, problem = serve.api_key_file, "", "no such file"
    if not path:
        return ""
    try:
        if os.path.isfile(path):
            with open(path, encoding="ascii") as file:
                key, problem = file.read(4096).strip(), "another content"
    except (OSError, UnicodeDecodeError) as error:
        problem = str(error)
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"rl.serve.api_key_file must be a file with one key of printable characters and nothing "
            f"else, got {problem} in {path!r}; write one: echo tml-$(openssl rand -hex 16) > FILE"
        )
    return key


def check_gradients_add_up(job_config: BaseJobConfig) -> None:
    """A batch's weights are shares of the whole optimizer step, so gradients have to be sums."""
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


def _policy(job_config: JobConfig) -> Iterator[str]:
    if job_config.model.value_head:
        yield (
            "RL trains a policy, which gives logits of tokens, got model.value_head = True; set it "
            "to false: a critic comes with rl.advantage.name = 'gae'"
        )


_LARGEST_COUNT = 10**9
_SMALLEST_COUNTS = {
    "num_prompts_per_step": 1,
    "num_samples_per_prompt": 1,
    "minibatches": 1,
    "redraws": 0,
    "overlong_tokens": 0,
    "epochs": 1,
    "async_steps": 0,
    "eval_every": 0,
    "eval_samples": 1,
    "seed": 0,
    "log_samples": -1,
    "critic.warmup_steps": 0,
    "batch.seq_len": 2,
    "batch.local_batch_size": 1,
    "batch.max_tokens_per_microbatch": 1,
    "batch.pad_multiple": 1,
    "generator.ranks": 0,
    "generator.max_batch_size": 1,
    "generator.max_snapshots": 0,
    "generator.tensor_parallel_degree": 1,
    "generator.max_seq_len": 2,
    "generator.max_requests": 1,
    "sampling.max_tokens": 1,
    "task.max_turns": 1,
    "serve.max_request_mib": 1,
}
_NOT_NEGATIVE = (
    "loss.clip_eps",
    "loss.ratio_clip_low",
    "loss.ratio_clip_high",
    "loss.max_log_ratio",
    "loss.norm",
    "loss.kl_coef",
    "loss.entropy_coef",
    "loss.dual_clip",
    "overlong_penalty",
    "critic.lr",
    "critic.weight_decay",
    "critic.value_clip",
)


def _numbers(job_config: JobConfig) -> Iterator[str]:
    for key in (*_SMALLEST_COUNTS, *_NOT_NEGATIVE):
        value, smallest = value_of(job_config.rl, key), _SMALLEST_COUNTS.get(key, 0)
        largest = math.inf if key == "seed" else _LARGEST_COUNT
        # NaN, which is never between two numbers, fails, too.
        if value is not None and not smallest <= value <= largest:
            rule = (
                f"at least {smallest}"
                if key in _SMALLEST_COUNTS
                else "a finite number of at least 0"
            )
            rule = f"at most {largest}" if value > largest else rule
            yield f"rl.{key} must be {rule}, got {value}; the default is {value_of(RL(), key)}"


def _loss(job_config: JobConfig) -> Iterator[str]:
    loss = job_config.rl.loss
    needs_norm = loss.agg_mode == "seq-mean-token-sum-norm"
    if needs_norm and not loss.norm > 0:
        yield (
            f"rl.loss.agg_mode = 'seq-mean-token-sum-norm' divides by the constant rl.loss.norm, "
            f"got {loss.norm}; set it, for instance to rl.sampling.max_tokens = "
            f"{job_config.rl.sampling.max_tokens}"
        )
    if loss.norm and not needs_norm:
        yield (
            f"rl.loss.norm = {loss.norm} is read by agg_mode 'seq-mean-token-sum-norm' only, got "
            f"{loss.agg_mode!r}; take one of them out"
        )
    if loss.count_empty and loss.agg_mode.startswith("token"):
        yield (
            f"rl.loss.count_empty is read by agg_modes of sequences and prompts only, got "
            f"{loss.agg_mode!r}; take one of them out"
        )
    if loss.max_log_ratio == 0:
        yield (
            "rl.loss.max_log_ratio must be above 0, got 0, which makes every ratio 1; "
            "the default is 10"
        )
    yield from problem_in(loss_from_config, loss)
    cp = job_config.parallelism.context_parallel_degree
    if cp > 1 and loss_from_config(loss).needs_whole_sequences:
        yield (
            f"rl.loss.name = 'gspo', rl.loss.correction = 'sequence' and "
            f"rl.loss.max_sequence_mismatch take ratios over whole sequences, which context "
            f"parallelism splits, got rl.loss.name = {loss.name!r}, correction = "
            f"{loss.correction!r} and parallelism.context_parallel_degree = {cp}; set that to 1, or "
            f"take 'grpo' with corrections per token"
        )


def _rows(job_config: JobConfig) -> Iterator[str]:
    batch, training = job_config.rl.batch, job_config.training
    seq_len, limit = batch_seq_len(job_config), batch.max_tokens_per_microbatch
    if seq_len > training.seq_len:
        yield (
            f"rl.batch.seq_len must not be above training.seq_len, which sets how many positions "
            f"the model knows, got {seq_len} with {training.seq_len}; raise training.seq_len"
        )
    if seq_len % batch.pad_multiple:
        yield (
            f"rl.batch.pad_multiple must divide the row length {seq_len}, got "
            f"{batch.pad_multiple}; change it, or rl.batch.seq_len"
        )
    if limit is not None and batch.local_batch_size is not None:
        yield (
            f"rl.batch.local_batch_size and rl.batch.max_tokens_per_microbatch both set the rows "
            f"of a microbatch, got {batch.local_batch_size} and {limit}; take one of them out"
        )
    if limit is not None and limit < seq_len:
        yield (
            f"rl.batch.max_tokens_per_microbatch must hold a row of {seq_len} tokens, got {limit}; "
            f"raise it, or lower rl.batch.seq_len"
        )
    loss = job_config.rl.loss
    if batch.skip_zero_advantage and (loss.kl_coef > 0 or loss.entropy_coef > 0):
        yield (
            f"rl.batch.skip_zero_advantage leaves out samples for which the loss is 0, and its KL and "
            f"entropy terms are not, got rl.loss.kl_coef = {loss.kl_coef} and entropy_coef = "
            f"{loss.entropy_coef}; turn it off, or set both to 0"
        )
    mask_type = job_config.model.attn_mask_type
    if batch.packing and mask_type != "position_block_causal":
        yield (
            f"rl.batch.packing keeps the samples of a row apart by their positions, got "
            f"model.attn_mask_type = {mask_type!r}; set it to 'position_block_causal' with "
            f"model.attn_type = 'flex' or 'varlen', or turn packing off"
        )


def _rewards(job_config: JobConfig) -> Iterator[str]:
    rl = job_config.rl
    yield from _critic(job_config)
    if not job_config.has_critic:
        yield from problem_in(AdvantageEstimator, rl.advantage.name, rl.advantage.std)
    # A group of one has an advantage of 0.
    if rl.advantage.name in ("group_mean", "rloo") and rl.num_samples_per_prompt < 2:
        yield (
            f"rl.advantage.name = {rl.advantage.name!r} compares completions of one prompt, got "
            f"rl.num_samples_per_prompt = {rl.num_samples_per_prompt}; set it to 2 or more, or "
            f"rl.advantage.name to 'none' or 'gae'"
        )
    if rl.redraws and rl.num_samples_per_prompt < 2:
        yield (
            f"rl.redraws = {rl.redraws} draws again where all completions of a prompt have one reward, "
            f"which one completion always has, got rl.num_samples_per_prompt = "
            f"{rl.num_samples_per_prompt}; set it to 2 or more, or rl.redraws to 0"
        )
    if rl.minibatches > rl.num_prompts_per_step:
        yield (
            f"rl.minibatches hold whole prompts and must not be more than rl.num_prompts_per_step = "
            f"{rl.num_prompts_per_step}, got {rl.minibatches}; lower it"
        )
    if not loss_class(rl.loss.name).has_generator:
        yield (
            f"rl.loss.name = {rl.loss.name!r} reads no rewards, so nothing would be reinforced; "
            "take 'grpo', or give this loss to PolicyTrainer.forward_backward with batches of your "
            "own"
        )


def _critic(job_config: JobConfig) -> Iterator[str]:
    rl, steps = job_config.rl, job_config.training.steps
    if not job_config.has_critic:
        keys = ["advantage.gamma", "advantage.lam", "advantage.whiten"]
        keys += [f"critic.{name}" for name in vars(rl.critic)]
        yield from _not_read(rl, keys, "advantage.name", "gae")
        return
    yield from problem_in(GAE, rl.advantage.gamma, rl.advantage.lam)
    if rl.advantage.std:
        yield (
            "rl.advantage.std divides by the standard deviation of a prompt's rewards, got "
            "rl.advantage.name = 'gae', which does not compare them; set it to false: "
            "rl.advantage.whiten divides by that of all tokens"
        )
    if rl.batch.skip_zero_advantage:
        yield (
            "rl.batch.skip_zero_advantage leaves out samples that teach the policy nothing, and the "
            "critic of rl.advantage.name = 'gae' learns from all of them; turn it off"
        )
    path = rl.critic.initial_load_path
    if path and not os.path.isdir(path):
        yield (
            f"rl.critic.initial_load_path must be a folder of weights, got {path!r} (looked in "
            f"{os.getcwd()}); correct the path, or leave it out to begin with the policy's weights"
        )
    if rl.critic.warmup_steps >= steps:
        yield (
            f"rl.critic.warmup_steps must leave steps in which the policy learns, got "
            f"{rl.critic.warmup_steps} with training.steps = {steps}; lower it"
        )


def _task(job_config: JobConfig) -> Iterator[str]:
    task = job_config.rl.task
    yield from problem_in(task_builder, task.name)
    # key -> (its largest value, why)
    limits = {
        "sum_digits": {"num_min": (task.num_max, "rl.task.num_max"), "value_max": None},
        "copy": {"length": None, "num_letters": (26, "the alphabet")},
        "guess": {"value_max": None},
    }
    limits["sort"] = limits["copy"]
    for key, limit in limits.get(task.name, {}).items():
        value = getattr(task, key)
        if value < 1 or (limit and value > limit[0]):
            upper = f" and at most {limit[0]} ({limit[1]})" if limit else ""
            yield f"rl.task.{key} must be at least 1{upper}, got {value}; choose another number"
    if not 0 <= task.reward_processes <= 1024:
        yield (
            f"rl.task.reward_processes must be 0 to 1024, got {task.reward_processes}; 0 calls the "
            "function in the rank's own process"
        )
    if not 1 <= task.tool_processes <= 1024:
        yield f"rl.task.tool_processes must be 1 to 1024, got {task.tool_processes}; correct it"
    for key in ("reward_timeout_seconds", "tool_timeout_seconds"):
        if not 0 < getattr(task, key) < math.inf:
            yield f"rl.task.{key} must be above 0, got {getattr(task, key)}; the default is 10"
    if task.name != "jsonl":
        return
    for key in ("path", "eval_path"):
        path = getattr(task, key)
        if not os.path.isfile(path) and (path or key == "path"):
            yield (
                f"rl.task.{key} must be a file with one JSON object per line for rl.task.name = "
                f"'jsonl', got {path!r} (looked in {os.getcwd()}); correct the path"
            )
    yield from problem_in(find_function, task.reward_fn)
    if task.chat_template and not os.path.isfile(task.chat_template):
        yield (
            f"rl.task.chat_template must be a file with a Jinja template, got "
            f"{task.chat_template!r} (looked in {os.getcwd()}); correct the path"
        )
    yield from problem_in(chat_variables, task)
    for name in task.tools:
        yield from problem_in(find_function, name, "rl.task.tools")
    if task.tools and task.max_turns == 1:
        yield (
            f"rl.task.tools = {task.tools} answer the policy, which then needs another turn, got "
            "rl.task.max_turns = 1; raise it"
        )


def _sampling(job_config: JobConfig) -> Iterator[str]:
    """The ratio needs log-probs of the distribution that tokens were drawn from."""
    sampling, seq_len = job_config.rl.sampling, batch_seq_len(job_config)
    if not 0 < sampling.temperature < math.inf:
        yield (
            f"rl.sampling.temperature must be above 0, got {sampling.temperature}; greedy decoding "
            f"has no log-probs to learn from, and evaluation is greedy anyway"
        )
    for key, keeps_all in (("top_p", 1.0), ("top_k", 0)):
        if getattr(sampling, key) != keeps_all:
            yield (
                f"rl.sampling.{key} must be {keeps_all} in training, because the trainer scores "
                f"tokens over the whole vocabulary and not over those that were kept, got "
                f"{getattr(sampling, key)}; lower rl.sampling.temperature instead"
            )
    if job_config.rl.overlong_tokens > sampling.max_tokens:
        yield (
            f"rl.overlong_tokens are the last tokens of rl.sampling.max_tokens = "
            f"{sampling.max_tokens}, got {job_config.rl.overlong_tokens}; lower it"
        )
    if any(token < 0 for token in sampling.stop_token_ids):
        yield (
            f"rl.sampling.stop_token_ids must be ids of tokens, got {sampling.stop_token_ids}; "
            f"take out what is below 0"
        )
    if "" in sampling.stop_strings:
        yield "rl.sampling.stop_strings must have characters, got ''; take it out"
    if sampling.max_tokens >= seq_len:
        yield (
            f"rl.sampling.max_tokens must leave room for the prompt in rows of {seq_len} tokens, "
            f"got {sampling.max_tokens}; lower it, or raise training.seq_len"
        )


def _generator(job_config: JobConfig) -> Iterator[str]:
    generator = job_config.rl.generator
    for backend, names in {
        "vllm": ("memory_share", "tensor_parallel_degree", "max_seq_len"),
        "openai": ("url", "model", "reload_url", "max_requests", "timeout_seconds"),
    }.items():
        if generator.backend != backend:
            keys = [f"generator.{name}" for name in names]
            yield from _not_read(job_config.rl, keys, "generator.backend", backend)
    if generator.backend == "openai":
        yield from _server(job_config)
    redraws, async_steps = job_config.rl.redraws, job_config.rl.async_steps
    if generator.in_flight and (generator.backend != "local" or not async_steps):
        yield (
            f"rl.generator.in_flight gives new weights to a generator of our own while it draws, beside "
            f"training, got rl.generator.backend = {generator.backend!r} and rl.async_steps = "
            f"{async_steps}; set them to 'local' and at least 1, or turn in_flight off"
        )
    max_turns = job_config.rl.task.max_turns
    agrees = redraws > 0 or max_turns > 1
    if generator.tensor_parallel_degree > 1 and agrees and async_steps and not generator.ranks:
        # They would do so on a thread, with the process group that the trainer is using.
        yield (
            f"ranks that split one copy of a generator agree on what is drawn again and on replies, "
            f"and with rl.async_steps the trainer would be in their way, got rl.redraws = {redraws}, "
            f"rl.task.max_turns = {max_turns}, rl.async_steps = {async_steps} and "
            f"rl.generator.tensor_parallel_degree = {generator.tensor_parallel_degree}; set "
            "rl.generator.ranks, or the others to their defaults"
        )
    if generator.ranks:
        for key, is_set in {
            "comm.mode": job_config.comm.mode != "default",
            "checkpoint.create_seed_checkpoint": job_config.checkpoint.create_seed_checkpoint,
        }.items():
            if is_set:
                yield (
                    f"rl.generator.ranks = {generator.ranks} generates on ranks of their own, and "
                    f"{key} has no such ranks; take one of them out"
                )
    if not 0 < generator.memory_share <= 1:
        yield (
            f"rl.generator.memory_share must be above 0 and at most 1, got "
            f"{generator.memory_share}; the default is {RL().generator.memory_share}"
        )


def _not_read(rl: RL, keys: Sequence[str], choice: str, reader: str) -> Iterator[str]:
    """The keys that are set, although only another choice than today's reads them."""
    for key in keys:
        if value_of(rl, key) != value_of(RL(), key):
            yield (
                f"rl.{key} = {value_of(rl, key)} is read by rl.{choice} = {reader!r} only, got "
                f"{value_of(rl, choice)!r}; take one of them out"
            )


def _server(job_config: JobConfig) -> Iterator[str]:
    generator, async_steps = job_config.rl.generator, job_config.rl.async_steps
    for key in ("url", "reload_url") if generator.reload_url else ("url",):
        if not getattr(generator, key).startswith(("http://", "https://")):
            yield (
                f"rl.generator.{key} must be an address like http://10.0.0.2:8000 for "
                f"rl.generator.backend = 'openai', got {getattr(generator, key)!r}; correct it"
            )
    if not generator.model:
        yield "rl.generator.model must be the model's name on the server, got ''; set it"
    if not 0 < generator.timeout_seconds < math.inf:
        yield (
            f"rl.generator.timeout_seconds must be above 0, got {generator.timeout_seconds}; the "
            "default is 600"
        )
    # A server has one version of the weights, and only one rank can say when the next one comes.
    if generator.ranks > 1 or (async_steps and not generator.ranks):
        yield (
            f"rl.generator.backend = 'openai' has one server, which another rank must not give new "
            f"weights while one draws, got rl.generator.ranks = {generator.ranks} and rl.async_steps = "
            f"{async_steps}; set rl.generator.ranks to 1, or both to 0"
        )


def reasons_not_to_share(rl: RL, trainer_dtype: str | None = None) -> list[str]:
    """Why the generator cannot use the trainer's own weights; empty if it can.

    trainer_dtype: of the trainer's matrix products; None as long as there is no trainer.
    """
    reasons = []
    if rl.generator.backend != "local":
        reasons.append(f"rl.generator.backend = {rl.generator.backend!r} has weights of its own")
    if rl.generator.ranks:
        reasons.append(f"rl.generator.ranks = {rl.generator.ranks} generate on ranks of their own")
    if rl.async_steps:
        reasons.append(
            f"rl.async_steps = {rl.async_steps} draws while the trainer changes its weights"
        )
    if trainer_dtype and rl.generator.dtype not in (None, trainer_dtype):
        reasons.append(f"rl.generator.dtype = {rl.generator.dtype!r} is not the trainer's")
    return reasons


def weight_sharing(rl: RL, trainer_dtype: str | None = None) -> Iterator[str]:
    if rl.weight_sync.mode == "reference":
        for reason in reasons_not_to_share(rl, trainer_dtype):
            yield (
                f"rl.weight_sync.mode = 'reference' shares the trainer's weights, and {reason}; "
                "set it to 'auto' or 'broadcast'"
            )


def rescoring(rl: RL, trainer_dtype: str | None = None) -> Iterator[str]:
    if not rl.generator.rescore:
        return
    if rl.async_steps:
        yield (
            f"rl.generator.rescore takes log-probs from today's weights, and with rl.async_steps = "
            f"{rl.async_steps} episodes are drawn with earlier ones; turn one of them off"
        )
    if rl.generator.backend != "local":
        yield (
            f"rl.generator.rescore would hide how far rl.generator.backend = "
            f"{rl.generator.backend!r} samples from the trainer's policy, and every ratio would be "
            "1; turn rescore off"
        )
    if trainer_dtype and rl.generator.dtype not in (None, trainer_dtype):
        yield (
            f"rl.generator.rescore would hide how far rl.generator.dtype = {rl.generator.dtype!r} "
            f"samples from the trainer's policy in {trainer_dtype}, and every ratio would "
            "be 1; turn rescore off, or leave the dtype out"
        )
