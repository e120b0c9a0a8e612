"""Rules for the `[rl]` sections; see `torchtitan.config.checks` for their form."""

import ipaddress
import math
import os
import re
from collections.abc import Iterator

from torchtitan.config import JobConfig as BaseJobConfig
from torchtitan.config.checks.common import (
    clash,
    divides,
    is_file,
    no_effect,
    problem_in,
    refuse,
    value_of,
)
from torchtitan.config.checks.values import single_values
from torchtitan.config.mask_types import reads_positions
from torchtitan.rl.advantages import GAE, AdvantageEstimator
from torchtitan.rl.job_config import RL, JobConfig, RLServe, batch_seq_len
from torchtitan.rl.jsonl_task import chat_variables
from torchtitan.rl.losses import loss_class, loss_from_config
from torchtitan.rl.tasks import find_function, task_builder
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import open_file
from torchtitan.tools.utils import get_device_type


def check_rl_config(job_config: JobConfig) -> None:
    """Raise ConfigError for the first rule that the `[rl]` sections break.

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
    """As `check_rl_config`, for the keys that a `PolicyTrainer` reads: no tasks, no sampling."""
    refuse(
        single_values(job_config),
        _policy(job_config),
        _loss(job_config),
        _rows(job_config),
        _exact(job_config),
    )
    check_gradients_add_up(job_config)


def check_not_divided(job_config: JobConfig) -> None:
    """Raise ConfigError if `rl.generator.ranks` is set, for code that does not divide the ranks."""
    if job_config.ranks_apart:
        raise ConfigError(
            f"rl.generator.ranks = {job_config.ranks_apart} divides the job's ranks before a "
            "Controller, PolicyTrainer or client is built on them; start with torchtitan.rl.train or "
            "rl.controller.build_part, or set it to 0"
        )


def check_server_config(job_config: JobConfig) -> None:
    """As `check_rl_config`, for the keys that `torchtitan.rl.serve` reads."""
    check_trainer_config(job_config)
    refuse(_serve(job_config), weight_sharing(job_config.rl))


def _serve(job_config: JobConfig) -> Iterator[str]:
    serve = job_config.rl.serve
    try:
        ipaddress.ip_address(serve.host)
    except ValueError:
        yield f"rl.serve.host must be an IP address, got {serve.host!r}; 127.0.0.1 is this machine"
    if not serve.base_model:
        yield "rl.serve.base_model must be a name, got ''; the default is 'policy'"
    if wrong := [name for name in serve.names if not re.fullmatch(r"[a-z0-9._-]+", name)]:
        yield (
            f"rl.serve.names must be host names in lower case, without ports, got {wrong[0]!r}; "
            "write it like 'trainer.example.org'"
        )
    api_key(serve)
    for key in (
        "generator.rescore",
        "generator.in_flight",
        "generator.replay_experts",
        "async_steps",
    ):
        if value := value_of(job_config.rl, key):
            yield (
                f"rl.{key} is for the loop of torchtitan.rl.train, got {value}; turn it off, because "
                "clients of a server choose the order of their requests"
            )


def api_key(serve: RLServe) -> str:
    """Return the key that the server's clients have to send; "" for none. Raises ConfigError."""
    path, key, problem = serve.api_key_file, "", "no such file"
    if not path:
        return ""
    try:
        if os.path.isfile(path):
            with open_file(path, encoding="ascii") as file:
                key, problem = file.read(4096).strip(), "another content"
    except (OSError, UnicodeDecodeError) as error:
        problem = str(error)
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"rl.serve.api_key_file must be a file with one key of printable characters and nothing "
            f"else, got {problem} in {path!r}; make it: "
            "(umask 077; echo tml-$(openssl rand -hex 16) > FILE)"
        )
    return key


def check_gradients_add_up(job_config: BaseJobConfig) -> None:
    """Raise ConfigError if gradients are not summed over ranks and over backward passes.

    A batch's weights are shares of the whole optimizer step, so its gradient is a sum.
    """
    reduction = job_config.training.gradient_reduction
    if reduction != "sum":
        raise ConfigError(
            f"in RL gradients of all ranks have to be added up, because a token's weight is its share "
            f"of all ranks' tokens, got training.gradient_reduction = {reduction!r}; set it to 'sum'"
        )
    if job_config.optimizer.early_step_in_backward:
        raise ConfigError(
            "in RL gradients add up until optim_step, got optimizer.early_step_in_backward = true, "
            "which updates weights in every backward pass; set it to false"
        )


def _policy(job_config: JobConfig) -> Iterator[str]:
    if job_config.model.value_head:
        yield (
            "RL trains a policy, whose outputs are logits of tokens, got model.value_head = True; set "
            "it to false: rl.advantage.name = 'gae' adds a critic"
        )


def _loss(job_config: JobConfig) -> Iterator[str]:
    loss = job_config.rl.loss
    modes = [loss.agg_mode, job_config.rl.critic.agg_mode or loss.agg_mode]
    needs_norm = "seq-mean-token-sum-norm" in modes
    if needs_norm and not loss.norm > 0:
        yield (
            f"agg_mode = 'seq-mean-token-sum-norm' divides by the constant rl.loss.norm, "
            f"got {loss.norm}; set it, for instance to rl.sampling.max_tokens = "
            f"{job_config.rl.sampling.max_tokens}"
        )
    if loss.norm and not needs_norm:
        yield (
            f"rl.loss.norm = {loss.norm} is read by agg_mode 'seq-mean-token-sum-norm' only, got "
            f"{loss.agg_mode!r}; take norm out, or choose that agg_mode"
        )
    if loss.count_empty and all(mode.startswith("token") for mode in modes):
        yield (
            f"rl.loss.count_empty is read by agg_modes of sequences and prompts only, got "
            f"{loss.agg_mode!r}; take count_empty out, or choose another agg_mode"
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
    yield from divides("rl.batch.pad_multiple", batch.pad_multiple, "the row length", seq_len)
    if limit is not None:
        yield from clash(
            "rl.batch.max_tokens_per_microbatch",
            "sets the rows of a microbatch",
            {"rl.batch.local_batch_size": batch.local_batch_size},
        )
    if limit is not None and limit < seq_len:
        yield (
            f"rl.batch.max_tokens_per_microbatch must hold a row of {seq_len} tokens, got {limit}; "
            f"raise it, or lower rl.batch.seq_len"
        )
    loss = job_config.rl.loss
    if batch.skip_zero_advantage:
        yield from clash(
            "rl.batch.skip_zero_advantage",
            "leaves out samples whose policy loss is 0, with their KL and entropy terms",
            {"rl.loss.kl_coef": loss.kl_coef, "rl.loss.entropy_coef": loss.entropy_coef},
        )
    mask_type = job_config.model.attn_mask_type
    if batch.packing and not reads_positions(mask_type):
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
    # The advantage in a group of one completion is always 0.
    if rl.advantage.name in ("group_mean", "rloo") and rl.num_samples_per_prompt < 2:
        yield (
            f"rl.advantage.name = {rl.advantage.name!r} compares completions of one prompt, got "
            f"rl.num_samples_per_prompt = {rl.num_samples_per_prompt}; set it to 2 or more, or "
            f"rl.advantage.name to 'none' or 'gae'"
        )
    if rl.redraws and rl.num_samples_per_prompt < 2:
        yield (
            f"rl.redraws = {rl.redraws} replaces prompts whose completions all have the same reward, "
            f"which is always so with one completion, got rl.num_samples_per_prompt = "
            f"{rl.num_samples_per_prompt}; set it to 2 or more, or rl.redraws to 0"
        )
    if rl.minibatches > rl.num_prompts_per_step:
        yield (
            f"rl.minibatches must be at most rl.num_prompts_per_step = {rl.num_prompts_per_step}, "
            f"because each holds whole prompts, got {rl.minibatches}; lower it"
        )
    if not loss_class(rl.loss.name).has_generator:
        yield (
            f"rl.loss.name = {rl.loss.name!r} reads no rewards, so nothing would be reinforced; "
            "take 'grpo', or pass this loss to PolicyTrainer.forward_backward with batches of your "
            "own"
        )


def _critic(job_config: JobConfig) -> Iterator[str]:
    rl, steps = job_config.rl, job_config.training.steps
    if not job_config.has_critic:
        keys = ("rl.advantage.gamma", "rl.advantage.lam", "rl.advantage.whiten", "rl.critic.")
        why = f"with rl.advantage.name = {rl.advantage.name!r}; set that to 'gae'"
        yield from no_effect(job_config, keys, why)
        return
    yield from problem_in(GAE, rl.advantage.gamma, rl.advantage.lam)
    yield from clash(
        "rl.advantage.name = 'gae'",
        "has a critic that learns from all samples, without comparing the rewards of a prompt",
        {
            "rl.advantage.std": rl.advantage.std,  # whiten divides by that over all tokens
            "rl.batch.skip_zero_advantage": rl.batch.skip_zero_advantage,
        },
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
    # key -> (its largest value, the reason)
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
    if task.name != "jsonl":
        return
    yield from is_file("rl.task.path", task.path, " with one JSON object per line")
    if task.eval_path:
        yield from is_file("rl.task.eval_path", task.eval_path, " with one JSON object per line")
    yield from problem_in(find_function, task.reward_fn)
    if task.chat_template:
        yield from is_file("rl.task.chat_template", task.chat_template, " with a Jinja template")
    yield from problem_in(chat_variables, task)
    for name in task.tools:
        yield from problem_in(find_function, name, "rl.task.tools")
    if task.tools and task.max_turns == 1:
        yield (
            f"rl.task.tools = {task.tools} return results to the policy, which needs another turn to "
            "read them, got rl.task.max_turns = 1; raise it"
        )


def _sampling(job_config: JobConfig) -> Iterator[str]:
    """Log-probs for the loss must be of the distribution that tokens were drawn from."""
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
                f"tokens over the whole vocabulary and not over the kept tokens, got "
                f"{getattr(sampling, key)}; lower rl.sampling.temperature instead"
            )
    if job_config.rl.overlong_tokens > sampling.max_tokens:
        yield (
            f"rl.overlong_tokens must be at most rl.sampling.max_tokens = {sampling.max_tokens}, got "
            f"{job_config.rl.overlong_tokens}; lower it"
        )
    if any(token < 0 for token in sampling.stop_token_ids):
        yield (
            f"rl.sampling.stop_token_ids must be ids of tokens, got {sampling.stop_token_ids}; "
            f"take out the negative numbers"
        )
    if "" in sampling.stop_strings:
        yield "rl.sampling.stop_strings must not be empty strings, got ''; take it out"
    if sampling.max_tokens >= seq_len:
        yield (
            f"rl.sampling.max_tokens must leave room for the prompt in rows of {seq_len} tokens, "
            f"got {sampling.max_tokens}; lower it, or raise training.seq_len"
        )


def _generator(job_config: JobConfig) -> Iterator[str]:
    generator = job_config.rl.generator
    of_server = ("url", "model", "reload_url", "max_requests", "timeout_seconds", "weight_transfer")
    for backend, names in (
        ("vllm", ("memory_share", "tensor_parallel_degree", "max_seq_len")),
        ("openai", of_server),
    ):
        if generator.backend != backend:
            keys = tuple(f"rl.generator.{name}" for name in names)
            why = f"with rl.generator.backend = {generator.backend!r}; set that to {backend!r}"
            yield from no_effect(job_config, keys, why)
    if generator.backend == "openai":
        yield from _server(job_config)
    if generator.adapters:
        yield from _adapters_for_generator(job_config)
    redraws, async_steps = job_config.rl.redraws, job_config.rl.async_steps
    if generator.in_flight and (generator.backend != "local" or not async_steps):
        yield (
            f"rl.generator.in_flight updates the weights of a local generator while it draws beside "
            f"training, got rl.generator.backend = {generator.backend!r} and rl.async_steps = "
            f"{async_steps}; set them to 'local' and at least 1, or turn in_flight off"
        )
    max_turns = job_config.rl.task.max_turns
    agrees = redraws > 0 or max_turns > 1
    if generator.tensor_parallel_degree > 1 and agrees and async_steps and not generator.ranks:
        yield (
            f"ranks that split one copy of a generator have to exchange redraws and replies, and with "
            f"rl.async_steps they would do so on a thread, in the process group that the trainer is "
            f"using, got rl.redraws = {redraws}, rl.task.max_turns = {max_turns}, rl.async_steps = "
            f"{async_steps} and rl.generator.tensor_parallel_degree = "
            f"{generator.tensor_parallel_degree}; set rl.generator.ranks, or the other keys to their "
            "defaults"
        )
    if generator.ranks:
        yield from clash(
            f"rl.generator.ranks = {generator.ranks}",
            "needs separate ranks for generation",
            {
                "comm.mode": job_config.comm.mode.removeprefix("default"),
                "checkpoint.create_seed_checkpoint": job_config.checkpoint.create_seed_checkpoint,
            },
        )
    if job_config.rl.weight_sync.delta and (
        generator.adapters or not (generator.ranks or generator.weight_transfer == "gloo")
    ):
        yield (
            "rl.weight_sync.delta sends the changes of whole weights to rl.generator.ranks, or to a "
            "vLLM server with rl.generator.weight_transfer = 'gloo', got rl.generator.ranks = "
            f"{generator.ranks}, weight_transfer = {generator.weight_transfer!r} and adapters = "
            f"{generator.adapters}; set one of them, or turn delta off"
        )


def _server(job_config: JobConfig) -> Iterator[str]:
    generator, async_steps = job_config.rl.generator, job_config.rl.async_steps
    for key in ("url", "reload_url") if generator.reload_url else ("url",):
        if not getattr(generator, key).startswith(("http://", "https://")):
            yield (
                f"rl.generator.{key} must be an address like http://10.0.0.2:8000 for "
                f"rl.generator.backend = 'openai', got {getattr(generator, key)!r}; correct it"
            )
    if generator.weight_transfer:
        yield from clash(
            "rl.generator.weight_transfer",
            "sends whole weights without files",
            {f"rl.generator.{x}": getattr(generator, x) for x in ("reload_url", "adapters")},
        )
    if not generator.model:
        yield "rl.generator.model must be the model's name on the server, got ''; set it"
    if generator.ranks > 1 or (async_steps and not generator.ranks):
        yield (
            f"rl.generator.backend = 'openai' has one server, whose weights a rank must not update "
            f"while another rank draws, got rl.generator.ranks = {generator.ranks} and rl.async_steps "
            f"= {async_steps}; set rl.generator.ranks to 1, or both to 0"
        )


def _adapters_for_generator(job_config: JobConfig) -> Iterator[str]:
    """Yield what `rl.generator.adapters` does not go with."""
    generator, lora, checkpoint = job_config.rl.generator, job_config.lora, job_config.checkpoint
    if "lora" not in job_config.model.converters:
        yield (
            "rl.generator.adapters sends the adapters of the converter 'lora', got model.converters = "
            f"{job_config.model.converters}; add it, or turn adapters off"
        )
    yield from clash(
        "rl.generator.adapters",
        "sends files of adapters, of one rank and scale, to vLLM",
        {
            "lora.also_train": lora.also_train,
            "lora.rank_pattern": lora.rank_pattern,  # vLLM scales all layers by one alpha / r
            "lora.alpha_pattern": lora.alpha_pattern,
            "rl.generator.reload_url": generator.reload_url,
            "rl.generator.backend": generator.backend if generator.backend == "local" else None,
        },
    )
    path = checkpoint.initial_load_path or job_config.model.hf_assets_path
    is_same = os.path.realpath(path) == os.path.realpath(job_config.model.hf_assets_path)
    if generator.backend == "vllm" and not (checkpoint.initial_load_in_hf and is_same):
        yield (
            "rl.generator.adapters has vLLM read the base from model.hf_assets_path = "
            f"{job_config.model.hf_assets_path!r}, got checkpoint.initial_load_in_hf = "
            f"{checkpoint.initial_load_in_hf} and checkpoint.initial_load_path = "
            f"{checkpoint.initial_load_path!r}; train from that folder, too"
        )


def reasons_not_to_share(rl: RL, trainer_dtype: str | None = None) -> list[str]:
    """Return the reasons why the generator cannot use the trainer's own weights; empty if it can.

    trainer_dtype: of the trainer's matrix products; None if it is not known yet.
    """
    reasons = []
    if rl.generator.backend != "local":
        reasons.append(f"rl.generator.backend = {rl.generator.backend!r} has weights of its own")
    if rl.generator.ranks:
        reasons.append(f"rl.generator.ranks = {rl.generator.ranks} generates on separate ranks")
    if rl.async_steps:
        reasons.append(
            f"rl.async_steps = {rl.async_steps} draws while the trainer changes its weights"
        )
    if trainer_dtype and rl.generator.dtype not in (None, trainer_dtype):
        reasons.append(f"rl.generator.dtype = {rl.generator.dtype!r} is not the trainer's")
    return reasons


def _exact(job_config: JobConfig) -> Iterator[str]:
    """Rules for the config alone; `models.batch_invariant.use_batch_invariant` checks the model."""
    rl, layout = job_config.rl, job_config.parallelism
    if not rl.generator.exact:
        return
    tp, cp = layout.tensor_parallel_degree, layout.context_parallel_degree
    yield from clash(
        "rl.generator.exact",
        "has the trainer's own modules generate, uncompiled and unsplit, in the trainer's type",
        {
            "rl.generator.backend": rl.generator.backend.removeprefix("local"),
            "rl.generator.dtype": rl.generator.dtype,
            "rl.generator.in_flight": rl.generator.in_flight,
            "rl.generator.rescore": rl.generator.rescore,
            "compile.enable": job_config.compile.enable,
            "parallelism.tensor_parallel_degree": tp if tp > 1 else None,
            "parallelism.context_parallel_degree": cp if cp > 1 else None,
        },
    )
    if (device := get_device_type()) != "cpu":
        yield (
            f"rl.generator.exact is for CPUs, got a job on {device!r}; turn it off, and bound the "
            "difference with rl.loss.correction"
        )


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
    has_other_type = trainer_dtype and rl.generator.dtype not in (None, trainer_dtype)
    yield from clash(
        "rl.generator.rescore",
        "would hide how far the generator differs from the trainer's policy, as every ratio would be 1",
        {
            "rl.async_steps": rl.async_steps,  # draws with earlier weights
            "rl.generator.backend": rl.generator.backend.removeprefix("local"),
            "rl.generator.dtype": rl.generator.dtype if has_other_type else None,
        },
    )
