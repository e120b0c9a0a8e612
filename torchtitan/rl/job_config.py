"""The `[rl]` sections of a config; their rules are in `torchtitan.rl.checks`.

The policy's model, optimizer, schedule, layout and checkpoints are set in the same sections as in
pre-training, and `training.steps` counts optimizer steps.
Annotations must stay real types, as in `torchtitan.config.job_config`.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.config import JobConfig as BaseJobConfig
from torchtitan.config.fields import (
    Count,
    Fraction,
    NotNegative,
    Positive,
    PositiveFloat,
    Range,
    Section,
    section,
)
from torchtitan.loss.aggregation import LossAggregation
from torchtitan.tools.errors import ConfigError


@dataclass
class RLTask(Section):
    # The task to learn: sum_digits, copy, sort, guess (a number, in several turns), jsonl (prompts
    # from a file), or a task that the module of experimental.custom_import registers
    name: str = "sum_digits"
    max_turns: Positive = 1  # Limit of the policy's turns in one episode, if the task replies
    num_min: Positive = 2  # For sum_digits: the fewest numbers to add
    num_max: Positive = 2  # For sum_digits: the most numbers to add
    value_max: Positive = 9  # For sum_digits and guess: the largest number; the smallest is 0
    length: Positive = 3  # For copy and sort: number of letters in the prompt
    num_letters: Annotated[int, Range(1, 26)] = 8  # For copy and sort: size of the alphabet
    path: str = ""  # For jsonl: a file with one JSON object per line
    eval_path: str = ""  # For jsonl: the file to evaluate on; empty takes the first lines of path
    # For jsonl: key of the prompt, which is a string or a list of messages (objects with role and content)
    prompt_key: str = "prompt"
    # For jsonl: a file with the Jinja template that renders messages; empty takes the tokenizer's template
    chat_template: str = ""
    # For jsonl: variables of the template as a JSON object, such as {"enable_thinking": false}
    chat_variables: str = ""
    # For jsonl: functions that the policy may call, each as module:function
    tools: list[str] = field(default_factory=list)
    tool_processes: Annotated[int, Range(1, 1024)] = 1  # Processes per rank that call the tools
    # Time limit of one tool call; if a call takes longer, the policy gets an error as its result
    tool_timeout_seconds: PositiveFloat = 10.0
    answer_key: str = "answer"  # For jsonl: key of the expected answer (empty if missing)
    # For jsonl: the reward function, as module:function. It gets (completion text, expected answer), and
    # prompt, row (the JSON object) and turns if it has parameters of these names; it returns a number
    reward_fn: str = ""
    # For jsonl: number of processes per rank that call reward_fn; 0 calls it in the rank's own process
    reward_processes: Annotated[int, Range(0, 1024)] = 0
    # For jsonl with reward_processes: time limit of one call; a call that takes longer gives reward 0
    # and a warning
    reward_timeout_seconds: PositiveFloat = 10.0


@dataclass
class RLAdvantage(Section):
    # The baseline that is subtracted from a reward: the mean over the prompt's completions (group_mean),
    # the mean over the prompt's other completions (rloo), 0 (none), or a critic's value of each token (gae)
    name: Literal["group_mean", "rloo", "none", "gae"] = "group_mean"
    std: bool = False  # Divide by the standard deviation of the prompt's rewards
    gamma: Fraction = 1.0  # For gae: the discount per token
    # For gae: lambda. With 1 the advantage is return minus value; with 0 it is the one-step TD error
    lam: Fraction = 1.0
    # For gae: normalise the advantages of a step's tokens to mean 0 and standard deviation 1
    whiten: bool = True


@dataclass
class RLCritic(Section):
    # A folder of weights to begin with: a checkpoint of a model with a value head, or Hugging Face files;
    # empty takes the policy's weights
    initial_load_path: str = ""
    lr: NotNegative | None = None  # The critic's peak learning rate; None takes optimizer.lr
    # The critic's weight decay; None takes optimizer.weight_decay
    weight_decay: NotNegative | None = None
    # New values are clipped to this distance from the values at the start of the step; 0 turns this off
    value_clip: NotNegative = 0.2
    # How the per-token losses of the critic are combined; None takes rl.loss.agg_mode
    agg_mode: LossAggregation | None = None
    warmup_steps: Count = 0  # Number of steps at the start that train only the critic


@dataclass
class RLLoss(Section):
    # The policy loss: grpo (or ppo, which is the same), dapo, gspo, cispo, importance_sampling,
    # dro, cross_entropy, or a loss that the module of experimental.custom_import registers
    name: str = "grpo"
    # For grpo, ppo: ratios are clipped to this distance from 1; None is 0.2
    clip_eps: NotNegative | None = None
    # For dapo, gspo, cispo: ratios are clipped to this distance below 1; None is the loss's default
    ratio_clip_low: NotNegative | None = None
    # For dapo, gspo, cispo: ratios are clipped to this distance above 1; None is the loss's default
    ratio_clip_high: NotNegative | None = None
    # For grpo, ppo, dapo, gspo: a token with negative advantage has no gradient if its ratio is above
    # this bound; None is 3, 0 means no bound
    dual_clip: NotNegative | None = None
    # Importance weights: the trainer's probability at the start of the step divided by the generator's
    # probability, of each token (token) or of the whole completion (sequence)
    correction: Literal["none", "token", "sequence"] = "none"
    correction_cap: float = 2.0  # The largest importance weight
    # Leave out tokens whose log-probs by trainer and generator differ by more than this many nats;
    # None leaves out none
    max_token_mismatch: float | None = None
    # Leave out completions whose mean log-prob difference exceeds this many nats
    max_sequence_mismatch: float | None = None
    # Log-ratios are clamped to plus and minus this number, so that exp does not overflow
    max_log_ratio: Annotated[float, Range(0, 10**9, excluded=0)] = 10.0
    agg_mode: LossAggregation = "token-mean"  # How the step's per-token losses are combined
    # For seq-mean-token-sum-norm: the constant divisor, e.g. the length limit of completions
    norm: NotNegative = 0.0
    # Like verl, also count sequences without a token in the loss in means over sequences or prompts
    count_empty: bool = False
    # Weight of the KL divergence from the reference policy; if above 0, samples need ref_logprobs
    kl_coef: NotNegative = 0.0
    kl_type: Literal["k1", "k2", "k3"] = "k3"  # Estimator of the KL divergence
    entropy_coef: NotNegative = 0.0  # Weight of the entropy bonus
    # Settings of a registered loss that have no key above: a table [rl.loss.args] with beta = 0.1, ...
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class RLTeacher(Section):
    # Folder of a Hugging Face model with the policy's tokenizer: the teacher. At each sampled
    # token, training moves the policy's distribution towards the teacher's. Empty: no teacher
    folder: str = ""
    # The divergence: KL(policy || teacher) (reverse), or KL(teacher || policy) (forward)
    divergence: Literal["reverse", "forward"] = "reverse"
    # Compare only the teacher's k most probable tokens, and treat all other tokens as one token; 0 compares
    # all tokens
    top_k: Count = 0
    kl_weight: PositiveFloat = 1.0  # Weight of the divergence in the loss
    policy_weight: NotNegative = 1.0  # Weight of the policy loss [rl.loss] in the loss


@dataclass
class RLBatch(Section):
    # Length limit of a row, in tokens; None takes training.seq_len
    seq_len: Annotated[int, Range(2, 10**9)] | None = None
    # Rows per data-parallel rank in one forward pass; None takes training.local_batch_size
    local_batch_size: Positive | None = None
    # Limit of tokens per data-parallel rank in one forward pass, with padding; replaces local_batch_size
    max_tokens_per_microbatch: Positive | None = None
    # Put several samples into a row, which needs model.attn_mask_type = position_block_causal;
    # otherwise each sample has its own row
    packing: bool = False
    # Compute a prefix that samples share only once, such as the prompt of several completions; needs
    # packing. Loss and gradients are equal up to rounding; expert counts include a shared token once
    share_prefixes: bool = False
    bucketing: bool = False  # Put rows of similar length into a microbatch, to need less padding
    # Leave out samples whose advantage is 0, which have no gradient; denominators still count them
    skip_zero_advantage: bool = False
    pad_multiple: Positive = 1  # The longest row is padded to a multiple of this number of tokens


@dataclass
class RLGenerator(Section):
    # Sample with this package's model (local), with vLLM, or with an HTTP server that has OpenAI's
    # /v1/completions and returns token ids (openai)
    backend: Literal["local", "vllm", "openai"] = "local"
    # The last N ranks of the job only generate; with 0 all ranks generate and train
    ranks: Count = 0
    # Dtype of the generator's weights; None takes the dtype of the trainer's matrix products
    dtype: Literal["bfloat16", "float32"] | None = None
    max_batch_size: Positive = 256  # Completions that a data-parallel rank draws at the same time
    # Load new weights between the tokens of a completion, not only before the first; then results depend
    # on timing. For local generators with rl.async_steps
    in_flight: bool = False
    # For sampling clients (torchtitan.rl.client, torchtitan.rl.serve): weight snapshots kept in host memory
    max_snapshots: Count = 4
    # For vllm: share of the device's memory for weights and cache; a trainer on this device needs the rest
    memory_share: Annotated[float, Range(0, 1, excluded=0)] = 0.4
    tensor_parallel_degree: Positive = 1  # For vllm: ranks that split one model
    # For vllm: length limit of a prompt with its completion, in tokens; None takes training.seq_len
    max_seq_len: Annotated[int, Range(2, 10**9)] | None = None
    # For openai: one or several server addresses, such as http://10.0.0.2:8000, separated by commas, or a
    # file with one address per line, read again at each update. Servers may stop and restart
    url: str = ""
    model: str = ""  # For openai: the model's name on the server
    # For openai: address to which {"path": a folder of Hugging Face files, "version": n} is posted after
    # each update; the answer must come after the files are loaded. A path such as /reload is posted to each
    # server. Empty uses the endpoints of vLLM's server, which needs VLLM_SERVER_DEV_MODE=1
    reload_url: str = ""
    # For openai: send weights to a vLLM server without files, by vLLM's weight-transfer interface. Start the
    # server with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'. On CPUs the
    # backend is "gloo", and this package must be installed on the server's machine
    weight_transfer: Literal["", "nccl", "gloo"] = ""
    # For vllm and openai: send only the adapters of [lora], as files that vLLM loads beside its own base
    # model: the weights in model.hf_assets_path, or the weights that the server was started with
    adapters: bool = False
    max_requests: Positive = 64  # For openai: requests that a rank sends at the same time
    # For openai: time limit of one request, and of waiting while no server answers
    timeout_seconds: PositiveFloat = 600.0
    # Replace the generator's log-probs by log-probs of the trainer's forward pass, bitwise equal to
    # those of the first forward-backward pass. Only for a generator in the trainer's precision
    rescore: bool = False
    # For mixtures of experts: record each token's experts during generation, and have the trainer route
    # the token to the same experts, with the scores of the trainer's router
    replay_experts: bool = False
    # Use batch-invariant reductions in generator and trainer. Then log-probs are bitwise equal, so on-policy
    # ratios are exactly 1. Slower; for dense models on the CPU
    exact: bool = False


@dataclass
class RLSampling(Section):
    temperature: PositiveFloat = 1.0  # The number that divides logits in generation and in training
    top_p: float = 1.0  # top_p has to be 1, because the trainer scores all tokens of the vocabulary
    top_k: int = 0  # top_k has to be 0, because the trainer scores all tokens of the vocabulary
    max_tokens: Positive = 16  # Length limit of a completion, or of each turn in a dialogue
    # Ids of tokens that end a completion, besides the tokenizer's end-of-text token
    stop_token_ids: list[int] = field(default_factory=list)
    # Stop strings: the token that completes one of these strings ends the completion
    stop_strings: list[str] = field(default_factory=list)


@dataclass
class RLWeightSync(Section):
    # The generator shares the trainer's tensors (reference) or gets copies (broadcast); auto shares the
    # tensors if the generator can use them
    mode: Literal["auto", "reference", "broadcast"] = "auto"
    digest: bool = True  # Compare digests of the sent and received weights at each update
    # Send only the elements of weights that changed since the last update. For rl.generator.ranks and
    # rl.generator.weight_transfer = "gloo". Sender and receivers keep one more copy in host memory
    delta: bool = False


@dataclass
class RLServe(Section):
    host: str = "127.0.0.1"  # Address to listen at; only this machine can reach the default address
    # Host names of this server that clients may use, besides localhost and IP addresses
    names: list[str] = field(default_factory=list)
    api_key_file: str = ""  # File with the key that clients have to send as their TINKER_API_KEY
    port: Annotated[int, Range(0, 2**16 - 1)] = 8000  # Port to listen at; 0 takes any free port
    base_model: str = "policy"  # The model's name for clients
    only_base_model: bool = False  # Refuse clients that request a model of another name
    max_request_mib: Positive = 64  # Size limit of a request, in MiB
    # Limit of the number of datums in one forward-backward pass that several clients with adapters share;
    # a larger request gets a separate pass
    max_datums_per_pass: Positive = 512
    max_models: Positive = 64  # Limit of models with adapters that clients train at the same time
    # Memory per rank for adapters, gradients and optimizer states of idle models. The most recently used
    # models stay on the accelerator, the next in host memory, and the rest in files below job.dump_folder
    max_device_mib: Count = 1024
    max_host_mib: Count = 4096
    max_file_mib: Count = 16384


@dataclass
class RL(Section):
    num_prompts_per_step: Positive = 16  # Prompts per step
    num_samples_per_prompt: Positive = 16  # Completions of each prompt
    # Split a step's samples into this many minibatches, each with its own optimizer update. A minibatch has
    # all completions of its prompts
    minibatches: Positive = 1
    epochs: Positive = 1  # Number of times that a step trains on its samples
    # If all completions of a prompt get the same reward, draw a new prompt instead, up to this many times
    redraws: Count = 0
    # Penalize completions that reach the last N tokens before rl.sampling.max_tokens; the penalty grows
    # linearly to overlong_penalty at max_tokens. 0 means no penalty
    overlong_tokens: Count = 0
    overlong_penalty: NotNegative = 1.0
    # Number of steps by which generation may run ahead of training; with 0 they alternate
    async_steps: Count = 0
    eval_every: Count = 0  # Evaluate every N steps and after the last step; 0 means never
    eval_samples: Positive = 200  # Number of prompts per evaluation, always the same prompts
    seed: Annotated[int, Range(0, math.inf)] = 0  # Seed of the prompts and of the sampling
    # Number of episodes per step that are appended to episodes.jsonl; -1 appends all, 0 none
    log_samples: Annotated[int, Range(-1, 10**9)] = 16
    task: RLTask = section(RLTask, "Prompts and rewards")
    advantage: RLAdvantage = section(RLAdvantage, "How rewards become advantages")
    critic: RLCritic = section(RLCritic, "The value model for gae")
    loss: RLLoss = section(RLLoss, "The policy loss and how it is summed")
    teacher: RLTeacher = section(RLTeacher, "A model that the policy imitates on its own samples")
    batch: RLBatch = section(RLBatch, "How samples are put into rows")
    generator: RLGenerator = section(RLGenerator, "The generator of completions")
    sampling: RLSampling = section(RLSampling, "How completions are drawn for training")
    weight_sync: RLWeightSync = section(RLWeightSync, "How weights reach the generator")
    serve: RLServe = section(RLServe, "The HTTP server torchtitan.rl.serve")


@dataclass
class JobConfig(BaseJobConfig):
    """A pre-training job's config plus the `[rl]` sections.

    `--job.custom_config_module torchtitan.rl.job_config` merges these sections in.
    """

    rl: RL = section(RL)

    @property
    def has_critic(self) -> bool:
        return self.rl.advantage.name == "gae"

    @property
    def ranks_apart(self) -> int:
        return self.rl.generator.ranks

    def trainer_ranks(self, world_size: int) -> int:
        """Return the number of ranks that train; raises ConfigError if `rl.generator.ranks` leaves none."""
        apart = self.ranks_apart
        if apart and apart >= world_size:
            raise ConfigError(
                f"rl.generator.ranks must leave ranks that train, got {apart} with {world_size} in the job; "
                "start more ranks, or lower the key"
            )
        return world_size - apart


def batch_seq_len(job_config: JobConfig) -> int:
    """Return the length limit of a row of a batch, in tokens."""
    own = job_config.rl.batch.seq_len
    return job_config.training.seq_len if own is None else own


def longest_episode(job_config: JobConfig) -> int:
    """Return the length of the longest episode, prompt included, that fits into a row and the generator."""
    row, generator = batch_seq_len(job_config) + 1, job_config.rl.generator
    if generator.backend != "vllm":  # only vLLM counts the last token, which the model never reads
        return row
    return min(row, generator.max_seq_len or job_config.training.seq_len)
