"""Rules that relate keys of the `[rl]` sections. `job_config` declares the range of each single key."""

import ipaddress
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
from torchtitan.rl.advantages import AdvantageEstimator
from torchtitan.rl.job_config import RL, JobConfig, RLServe, batch_seq_len, longest_episode
from torchtitan.rl.jsonl_task import chat_variables
from torchtitan.rl.losses import check_context_parallel, loss_class, loss_from_config
from torchtitan.rl.tasks import find_function, task_builder
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import open_file
from torchtitan.tools.utils import get_device_type


def check_rl_config(job_config: JobConfig) -> None:
    """Raise ConfigError for the first rule that the `[rl]` sections break.

    The other sections are checked when the engine is built.
    """
    check_trainer_config(job_config)
    refuse(_loop(job_config), _critic(job_config), _task(job_config), _sampling(job_config))
    check_generator(job_config)


def check_generator(job_config: JobConfig) -> None:
    """Like `check_rl_config`, but only for the keys that a generator reads."""
    refuse(
        _batch_invariance(job_config), _generator(job_config), weights_of_generator(job_config.rl)
    )


def check_trainer_config(job_config: JobConfig) -> None:
    """Like `check_rl_config`, but only for the keys that a `PolicyTrainer` reads: no tasks, no sampling."""
    rules = single_values(job_config), _loss(job_config), _rows(job_config)
    refuse(*rules, _batch_invariance(job_config))
    check_gradients_add_up(job_config)


def check_server_config(job_config: JobConfig) -> None:
    """Like `check_rl_config`, but only for the keys that `torchtitan.rl.serve` reads."""
    check_trainer_config(job_config)
    refuse(_serve(job_config), weights_of_generator(job_config.rl))


def check_not_divided(job_config: JobConfig) -> None:
    """Raise ConfigError if `rl.generator.ranks` is set, because here all ranks train and generate."""
    if job_config.ranks_apart:
        raise ConfigError(
            f"rl.generator.ranks = {job_config.ranks_apart} splits the ranks into two roles at "
            "start-up; start with torchtitan.rl.train or rl.controller.build_part, or set it to 0"
        )


def check_gradients_add_up(job_config: BaseJobConfig) -> None:
    """Raise ConfigError if gradients are not summed over ranks and over backward passes."""
    reduction = job_config.training.gradient_reduction
    if reduction != "sum" or job_config.optimizer.early_step_in_backward:
        raise ConfigError(
            "RL sums gradients over ranks and calls until optim_step, got training.gradient_reduction = "
            f"{reduction!r} and optimizer.early_step_in_backward = "
            f"{job_config.optimizer.early_step_in_backward}; set them to 'sum' and false"
        )


def _at_most(key: str, value: int, limit_key: str, limit: int) -> Iterator[str]:
    if value > limit:
        yield f"{key} must be at most {limit_key} = {limit}, got {value}; lower it"


# ---- the server ----


def _serve(job_config: JobConfig) -> Iterator[str]:
    rl, serve = job_config.rl, job_config.rl.serve
    if problem_in(ipaddress.ip_address, serve.host):
        yield f"rl.serve.host must be an IP address, got {serve.host!r}; 127.0.0.1 is this machine"
    for name in serve.names:
        if not re.fullmatch(r"[a-z0-9._-]+", name):
            yield (
                f"rl.serve.names must be host names in lower case, without ports, got {name!r}; write it "
                "like 'trainer.example.org'"
            )
    api_key(serve)
    keys = ("generator.rescore", "generator.in_flight", "generator.replay_experts", "async_steps")
    for key in (*keys, "teacher.folder"):
        if value := value_of(rl, key):
            yield (
                f"rl.{key} is for the loop of torchtitan.rl.train, and clients of a server send requests and "
                f"losses of their own, got {value!r}; take it out"
            )


def api_key(serve: RLServe) -> str:
    """Return the key that the server's clients have to send; "" for none. Raises ConfigError."""
    path, key, problem = serve.api_key_file, "", "no such file"
    if not path:
        return ""
    try:
        if os.path.isfile(path):
            with open_file(path, encoding="ascii") as file:
                key, problem = file.read(4096).strip(), "other content"
    except (OSError, UnicodeDecodeError) as error:
        problem = str(error)
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"rl.serve.api_key_file must be a file with one key of printable characters and nothing "
            f"else, got {problem} in {path!r}; make it: "
            "(umask 077; echo tml-$(openssl rand -hex 16) > FILE)"
        )
    return key


# ---- the policy, its loss and its batches ----


def _loss(job_config: JobConfig) -> Iterator[str]:
    loss, cp = job_config.rl.loss, job_config.parallelism.context_parallel_degree
    if job_config.model.value_head:
        yield (
            "RL trains a model with logits, got model.value_head = True; set it to false: "
            "rl.advantage.name = 'gae' adds a critic with a value head"
        )
    modes = [loss.agg_mode, job_config.rl.critic.agg_mode or loss.agg_mode]
    if bool(loss.norm) != ("seq-mean-token-sum-norm" in modes):
        yield (
            f"rl.loss.norm = {loss.norm} is read by agg_mode 'seq-mean-token-sum-norm' only, which divides by "
            f"it, got {loss.agg_mode!r}; set both or neither, norm to rl.sampling.max_tokens for instance"
        )
    if loss.count_empty and all(mode.startswith("token") for mode in modes):
        yield (
            f"rl.loss.count_empty is read by agg_modes of sequences and prompts, got {loss.agg_mode!r}; take "
            "it out, or choose another agg_mode"
        )
    if not job_config.rl.teacher.folder:
        yield from no_effect(job_config, ("rl.teacher.",), "without rl.teacher.folder; set that")
    yield from problem_in(loss_from_config, loss)
    yield from problem_in(check_context_parallel, loss_from_config(loss), cp)


def _rows(job_config: JobConfig) -> Iterator[str]:
    rl, batch, training = job_config.rl, job_config.rl.batch, job_config.training
    seq_len, limit = batch_seq_len(job_config), batch.max_tokens_per_microbatch
    # training.seq_len is the length of the model's RoPE table.
    yield from _at_most("rl.batch.seq_len", seq_len, "training.seq_len", training.seq_len)
    yield from divides("rl.batch.pad_multiple", batch.pad_multiple, "the row length", seq_len)
    if limit is not None:
        key = "rl.batch.max_tokens_per_microbatch"
        others = {"rl.batch.local_batch_size": batch.local_batch_size}
        yield from clash(key, "sets the rows of a microbatch", others)
        yield from _at_most("the tokens of a row, rl.batch.seq_len,", seq_len, key, limit)
    if batch.skip_zero_advantage:
        terms = ("loss.kl_coef", "loss.entropy_coef", "teacher.folder")
        yield from clash(
            "rl.batch.skip_zero_advantage",
            "leaves out samples whose policy loss is 0, although their other loss terms are not",
            {f"rl.{key}": value_of(rl, key) for key in terms},
        )
    if batch.share_prefixes and not batch.packing:
        yield (
            "rl.batch.share_prefixes puts the samples that share tokens into one row, got rl.batch.packing = "
            "False; turn it on"
        )
    if batch.packing and not reads_positions(job_config.model.attn_mask_type):
        yield (
            f"rl.batch.packing needs positions, got model.attn_mask_type = {job_config.model.attn_mask_type!r}"
            "; set it to 'position_block_causal' with model.attn_type 'flex' or 'varlen'"
        )


def _batch_invariance(job_config: JobConfig) -> Iterator[str]:
    """Check the keys that conflict with `rl.generator.exact`.

    `models.batch_invariant.use_batch_invariant` checks the model.
    """
    generator, parallelism = job_config.rl.generator, job_config.parallelism
    if not generator.exact:
        return
    degrees = ("tensor_parallel_degree", "context_parallel_degree")
    yield from clash(
        "rl.generator.exact",
        "generates with the trainer's own modules, uncompiled, unsharded and in the trainer's dtype",
        {
            "rl.generator.backend": generator.backend.removeprefix("local"),
            "rl.generator.dtype": generator.dtype,
            "rl.generator.in_flight": generator.in_flight,
            "rl.generator.rescore": generator.rescore,
            "rl.batch.share_prefixes": job_config.rl.batch.share_prefixes,
            "compile.enable": job_config.compile.enable,
            **{f"parallelism.{n}": d for n in degrees if (d := getattr(parallelism, n)) > 1},
        },
    )
    if (device := get_device_type()) != "cpu":
        yield f"rl.generator.exact is for CPUs, got a job on {device!r}; take rl.loss.correction instead"


# ---- the loop ----


def _loop(job_config: JobConfig) -> Iterator[str]:
    rl = job_config.rl
    if not job_config.has_critic:
        yield from problem_in(AdvantageEstimator, rl.advantage.name, rl.advantage.std)
    # With one completion per prompt, all advantages are 0, and redraws replace every prompt.
    settings = {
        f"rl.advantage.name = {rl.advantage.name!r}": rl.advantage.name in ("group_mean", "rloo"),
        f"rl.redraws = {rl.redraws}": rl.redraws > 0,
    }
    for setting, compares in settings.items():
        if compares and rl.num_samples_per_prompt < 2:
            yield (
                f"{setting} compares completions of one prompt, got rl.num_samples_per_prompt = "
                f"{rl.num_samples_per_prompt}; set it to 2 or more, or rl.advantage.name to 'none' or "
                "'gae' and rl.redraws to 0"
            )
    # A minibatch has all completions of at least one prompt.
    prompts = rl.num_prompts_per_step
    yield from _at_most("rl.minibatches", rl.minibatches, "rl.num_prompts_per_step", prompts)
    if not loss_class(rl.loss.name).has_generator:
        yield (
            f"rl.loss.name = {rl.loss.name!r} reads no rewards; take 'grpo', or pass this loss to "
            "PolicyTrainer.forward_backward with batches of your own"
        )


def _critic(job_config: JobConfig) -> Iterator[str]:
    rl, steps = job_config.rl, job_config.training.steps
    if not job_config.has_critic:
        keys = ("rl.advantage.gamma", "rl.advantage.lam", "rl.advantage.whiten", "rl.critic.")
        why = f"with rl.advantage.name = {rl.advantage.name!r}; set that to 'gae'"
        yield from no_effect(job_config, keys, why)
        return
    # `advantage.whiten` replaces `advantage.std`: it divides by the standard deviation over all tokens.
    yield from clash(
        "rl.advantage.name = 'gae'",
        "has a critic that learns from all samples, without comparing the rewards of a prompt",
        {f"rl.{k}": value_of(rl, k) for k in ("advantage.std", "batch.skip_zero_advantage")},
    )
    path = rl.critic.initial_load_path
    if path and not os.path.isdir(path):
        yield (
            f"rl.critic.initial_load_path must be a folder of weights, got {path!r} (looked in "
            f"{os.getcwd()}); correct the path"
        )
    # At least one step must also train the policy.
    warmup_steps = rl.critic.warmup_steps
    yield from _at_most("rl.critic.warmup_steps", warmup_steps, "training.steps - 1", steps - 1)


def _task(job_config: JobConfig) -> Iterator[str]:
    task = job_config.rl.task
    yield from problem_in(task_builder, task.name)
    if task.name == "sum_digits":
        yield from _at_most("rl.task.num_min", task.num_min, "rl.task.num_max", task.num_max)
    if task.name != "jsonl":
        return
    files = {"path": "one JSON object per line", "eval_path": "one JSON object per line"}
    for key, content in (files | {"chat_template": "a Jinja template"}).items():
        if key == "path" or getattr(task, key):
            yield from is_file(f"rl.task.{key}", getattr(task, key), f" with {content}")
    yield from problem_in(find_function, task.reward_fn)
    yield from problem_in(chat_variables, task)
    for name in task.tools:
        yield from problem_in(find_function, name, "rl.task.tools")
    if task.tools and task.max_turns == 1:
        yield (
            f"rl.task.tools = {task.tools} return results, and the policy needs another turn to read them, "
            "got rl.task.max_turns = 1; raise it"
        )


def _sampling(job_config: JobConfig) -> Iterator[str]:
    """Check `[rl.sampling]`: the loss needs log-probs under the distribution that tokens were drawn from."""
    rl, sampling = job_config.rl, job_config.rl.sampling
    for key, keeps_all in (("top_p", 1.0), ("top_k", 0)):
        if getattr(sampling, key) != keeps_all:
            yield (
                f"rl.sampling.{key} must be {keeps_all} in training, because the trainer scores all tokens "
                f"of the vocabulary, got {getattr(sampling, key)}; lower rl.sampling.temperature instead"
            )
    if "" in sampling.stop_strings or min(sampling.stop_token_ids, default=0) < 0:
        yield (
            "rl.sampling.stop_strings must not be empty and stop_token_ids not negative, got "
            f"{sampling.stop_strings} and {sampling.stop_token_ids}; take these out"
        )
    n, key = sampling.max_tokens, "rl.sampling.max_tokens"
    yield from _at_most("rl.overlong_tokens", rl.overlong_tokens, key, n)
    # An episode also has a prompt, of at least one token.
    longest = longest_episode(job_config)
    yield from _at_most(key, n, "the longest episode - 1", longest - 1)


# ---- the generator ----

_ONLY_FOR = {
    "vllm": ("memory_share", "tensor_parallel_degree", "max_seq_len"),
    "openai": ("url", "model", "reload_url", "max_requests", "timeout_seconds", "weight_transfer"),
}


def _generator(job_config: JobConfig) -> Iterator[str]:
    rl, generator = job_config.rl, job_config.rl.generator
    for backend, names in _ONLY_FOR.items():
        if generator.backend != backend:
            keys = tuple(f"rl.generator.{name}" for name in names)
            why = f"with rl.generator.backend = {generator.backend!r}; set that to {backend!r}"
            yield from no_effect(job_config, keys, why)
    if generator.backend == "openai":
        yield from _server(rl)
    if generator.adapters:
        yield from _adapters_for_generator(job_config)
    if generator.in_flight and (generator.backend != "local" or not rl.async_steps):
        yield (
            f"rl.generator.in_flight updates the weights of a local generator that draws during "
            f"training, got rl.generator.backend = {generator.backend!r} and rl.async_steps = "
            f"{rl.async_steps}; set them to 'local' and at least 1, or turn in_flight off"
        )
    agrees = rl.redraws > 0 or rl.task.max_turns > 1
    if generator.tensor_parallel_degree > 1 and agrees and rl.async_steps and not generator.ranks:
        yield (
            "tensor-parallel ranks of a generator have to exchange redraws and replies in the process group "
            f"that the trainer is using, got rl.redraws = {rl.redraws}, rl.task.max_turns = "
            f"{rl.task.max_turns}, rl.async_steps = {rl.async_steps} and rl.generator.tensor_parallel_degree"
            f" = {generator.tensor_parallel_degree}; set rl.generator.ranks, or these to their defaults"
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
    takes_changes = generator.ranks or generator.weight_transfer == "gloo"
    if rl.weight_sync.delta and (generator.adapters or not takes_changes):
        yield (
            "rl.weight_sync.delta sends changes of whole weights to rl.generator.ranks or by "
            f"weight_transfer = 'gloo', got rl.generator.ranks = {generator.ranks}, weight_transfer = "
            f"{generator.weight_transfer!r} and adapters = {generator.adapters}; change these, or turn delta off"
        )


def addresses_in(setting: str) -> list[str]:
    """Return the addresses of `rl.generator.url`: separated by commas, or the lines of a file."""
    if os.path.isfile(setting):
        with open_file(setting, encoding="utf-8") as file:
            setting = file.read()
    return [address.rstrip("/") for address in re.split(r"[,\s]+", setting) if address]


def _server(rl: RL) -> Iterator[str]:
    generator = rl.generator
    urls = addresses_in(generator.url)
    is_path = generator.reload_url.startswith("/")
    reload_urls = [generator.reload_url] if generator.reload_url and not is_path else []
    for key, addresses in (("url", urls or [""]), ("reload_url", reload_urls)):
        for address in addresses:
            if not address.startswith(("http://", "https://")):
                yield (
                    f"rl.generator.{key} must be an address like http://10.0.0.2:8000 for "
                    f"rl.generator.backend = 'openai', got {address!r}; correct it"
                )
    if len(urls) > 1 and (reload_urls or generator.weight_transfer):
        yield (
            f"rl.generator.url names {len(urls)} servers, which load weights from files, each at its own "
            f"address, got reload_url = {generator.reload_url!r} and weight_transfer = "
            f"{generator.weight_transfer!r}; begin reload_url with /, and leave out weight_transfer"
        )
    if generator.weight_transfer:
        yield from clash(
            "rl.generator.weight_transfer",
            "sends whole weights without files",
            {f"rl.generator.{x}": getattr(generator, x) for x in ("reload_url", "adapters")},
        )
    if not generator.model:
        yield "rl.generator.model must be the model's name on the server, got ''; set it"
    if generator.ranks > 1 or (rl.async_steps and not generator.ranks):
        yield (
            "servers of rl.generator.backend = 'openai' must not take weights while a rank draws, "
            f"got rl.generator.ranks = {generator.ranks} and rl.async_steps = {rl.async_steps}; set "
            "rl.generator.ranks to 1, or both to 0"
        )


def _adapters_for_generator(job_config: JobConfig) -> Iterator[str]:
    generator, lora, checkpoint = job_config.rl.generator, job_config.lora, job_config.checkpoint
    if "lora" not in job_config.model.converters:
        yield (
            "rl.generator.adapters sends the adapters of the converter 'lora', got model.converters = "
            f"{job_config.model.converters}; add it"
        )
    # vLLM scales all layers by one alpha / r.
    names = ("also_train", "rank_pattern", "alpha_pattern")
    others = {f"lora.{name}": getattr(lora, name) for name in names}
    others["rl.generator.reload_url"] = generator.reload_url
    others["rl.generator.backend"] = generator.backend if generator.backend == "local" else ""
    reason = "sends files of adapters with one LoRA rank and scale to vLLM"
    yield from clash("rl.generator.adapters", reason, others)
    own = job_config.model.hf_assets_path
    is_same = os.path.realpath(checkpoint.initial_load_path or own) == os.path.realpath(own)
    if generator.backend == "vllm" and not (checkpoint.initial_load_in_hf and is_same):
        yield (
            f"rl.generator.adapters has vLLM read the base model from {own!r} (model.hf_assets_path), got "
            f"checkpoint.initial_load_in_hf = {checkpoint.initial_load_in_hf} and "
            f"initial_load_path = {checkpoint.initial_load_path!r}; train from that folder, too"
        )


def reasons_not_to_share(rl: RL, trainer_dtype: str | None = None) -> dict[str, str]:
    """Return the reasons why the generator cannot use the trainer's own weights, by setting.

    The dict is empty if the generator can use them.
    trainer_dtype: dtype of the trainer's matrix products; None if it is not known yet.
    """
    generator = rl.generator
    reasons = {
        "generator.backend": ("has weights of its own", generator.backend != "local"),
        "generator.ranks": ("generates on separate ranks", generator.ranks),
        "async_steps": ("draws while the trainer changes its weights", rl.async_steps),
        "generator.dtype": (
            "is not the trainer's",
            trainer_dtype and generator.dtype not in (None, trainer_dtype),
        ),
    }
    return {key: why for key, (why, is_so) in reasons.items() if is_so}


def weights_of_generator(rl: RL, trainer_dtype: str | None = None) -> Iterator[str]:
    """Yield a message for each conflict of other keys with `rl.weight_sync.mode` or `rl.generator.rescore`.

    trainer_dtype: as in `reasons_not_to_share`.
    """
    for key, why in reasons_not_to_share(rl, trainer_dtype).items():
        given = f"rl.{key} = {value_of(rl, key)!r}"
        if rl.weight_sync.mode == "reference":
            yield (
                f"rl.weight_sync.mode = 'reference' shares the trainer's weights, and {given} {why}; set it "
                "to 'auto' or 'broadcast'"
            )
        # Separate generating ranks may use the trainer's precision, so they don't conflict with `rescore`.
        if rl.generator.rescore and key != "generator.ranks":
            yield (
                "rl.generator.rescore would hide how far the generator differs from the trainer's policy, as "
                f"every ratio would be 1, got {given}; change one of the two"
            )
