"""What else runs on a device besides an engine's step: each returns what it noted, part by part."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from tests.cuda_rehearsal.jobs import common_flags, config_of, engine_of, ranks
from tests.reliability.jobs import flags_in
from torchtitan.estimate.rehearsal import Rehearsal, rehearsing

Notes = dict[str, dict[str, int]]
"""Part of the scenario -> what the host waited for there -> how often."""

SCENARIOS: dict[str, Callable[[str], Notes]] = {}


def scenario(function: Callable[[str], Notes]) -> Callable[[str], Notes]:
    SCENARIOS[function.__name__.replace("_", " ")] = function
    return function


@contextlib.contextmanager
def noting(rehearsal: Rehearsal, notes: Notes, part: str) -> Iterator[None]:
    rehearsal.forget()
    yield
    notes[part] = dict(rehearsal.waits + rehearsal.races)
    rehearsal.forget()


def _train(world_size: int, *flags: str) -> Notes:
    """Three steps on real data; the second one logs nothing."""
    from torchtitan.trainer import Trainer

    own = flags_in("""
        training.dataset=c4_test model.hf_assets_path=./tests/assets/tokenizer training.steps=3
        metrics.log_freq=100 lr_scheduler.warmup_steps=1
    """)
    config = config_of(*own, *flags)
    notes: Notes = {}
    with ranks(world_size), rehearsing() as rehearsal, Trainer(config) as trainer:
        train_step, save = trainer.train_step, trainer.checkpointer.save

        def noted_step(data: Iterator) -> None:
            part = {1: "first step", 2: "step", 3: "logged step"}[trainer.step]
            with noting(rehearsal, notes, part):
                train_step(data)

        def noted_save(step: int, **kwargs) -> None:
            with noting(rehearsal, notes, f"save {step}"):
                save(step, **kwargs)

        trainer.train_step, trainer.checkpointer.save = noted_step, noted_save
        rehearsal.forget()
        trainer.train()
        notes["end"] = dict(rehearsal.waits + rehearsal.races)
    return {part: noted for part, noted in notes.items() if part != "first step"}


CHECKPOINTS = ["--checkpoint.enable", "--checkpoint.interval=1", "--parallelism.always_fsdp=True"]
VALIDATION = flags_in("""
    validation.enable validation.freq=2 validation.steps=2 validation.dataset=c4_test
    validation.seq_len=256 model.attn_type=flex model.attn_mask_type=block_causal
    debug.check_document_isolation_freq=3
""")
for _name, _ranks, _flags in (
    ("trainer accumulates", 8, ["--training.global_batch_size=64"]),
    ("trainer validates", 4, VALIDATION),
    ("checkpoint async", 1, [*CHECKPOINTS, "--checkpoint.async_mode=async"]),
    ("checkpoint pinned", 1, [*CHECKPOINTS, "--checkpoint.async_mode=async_with_pinned_mem"]),
):
    SCENARIOS[_name] = lambda _, ranks=_ranks, flags=_flags: _train(ranks, *flags)


@scenario
def scores_lists(_name: str) -> Notes:
    """Lists of unlike microbatches, log-probs without logits, a denominator that comes last."""
    from torchtitan.loss.logprobs import TokenLogProbs

    notes: Notes = {}
    tokens = [torch.zeros(2, n, dtype=torch.int64) for n in (128, 256, 64)]
    batches = [{"input": t, "labels": t} for t in tokens]
    with engine_of(8) as (engine, rehearsal):
        for _ in range(2):
            with noting(rehearsal, notes, "forward_step"):
                engine.forward_step(batches, head=TokenLogProbs())
            with noting(rehearsal, notes, "forward_backward_step"):
                engine.forward_backward_step(
                    input_dict=batches,
                    labels=tokens,
                    global_valid_tokens=1.0,
                    head=TokenLogProbs(),
                )
            denominator = torch.tensor(7.0, device=engine.device)
            with noting(rehearsal, notes, "optim_step"):
                engine.optim_step(denominator=denominator)
    return notes


@scenario
def to_host_and_back(_name: str) -> Notes:
    notes: Notes = {}
    tokens = torch.zeros(2, 256, dtype=torch.int64)
    with engine_of(8) as (engine, rehearsal):
        for _ in range(2):
            engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=512
            )
            engine.optim_step()
            with noting(rehearsal, notes, "to host"):
                engine.to("cpu")
            with noting(rehearsal, notes, "back"):
                engine.to("cuda")
    return notes


@scenario
def weight_stream(_name: str) -> Notes:
    notes: Notes = {}
    with engine_of(8, "--parallelism.tensor_parallel_degree=2") as (engine, rehearsal):
        for dtype in (None, torch.bfloat16):
            with noting(rehearsal, notes, "whole"):
                stream = engine.iter_hf_weights(dtype=dtype)
                assert sum(1 for _ in stream) == 21
            with noting(rehearsal, notes, "sharded"):
                for _ in engine.iter_hf_weights(dtype=dtype, sharded=True):
                    pass
    return notes


@scenario
def generation(_name: str) -> Notes:
    from torchtitan.generation.sampling import generate

    notes: Notes = {}
    for name in ("llama3", "deepseek_v3", "gpt_oss"):
        with engine_of(1, f"--model.name={name}") as (engine, rehearsal):
            prompt = torch.zeros(2, 8, dtype=torch.int64, device=engine.device)
            (model,) = engine.model_parts
            for _ in range(2):
                with noting(rehearsal, notes, name):
                    generate(model, prompt, max_new_tokens=2, temperature=1.0, top_k=5, seed=0)
    return notes


@scenario
def adapters_of_two_models(_name: str) -> Notes:
    """A microbatch with rows of both, unsorted, through a mixture of experts."""
    from torchtitan.adapters.lora import add_adapter
    from torchtitan.adapters.multi_lora import MultiLoRA
    from torchtitan.models.moe import MoE, MoEArgs

    notes: Notes = {}
    with ranks(1), rehearsing() as rehearsal:
        moe = MoE(MoEArgs(num_experts=4, num_shared_experts=1, top_k=2), dim=64, hidden_dim=64)
        moe.to("cuda", torch.bfloat16).requires_grad_(False)
        add_adapter(moe.experts, "w1", rank=8, scale=1.0, dropout=0.0)
        add_adapter(moe.shared_experts.w1, "weight", rank=8, scale=1.0, dropout=0.0)
        adapters = {name: p.detach() for name, p in moe.named_parameters() if "lora" in name}
        together, x = MultiLoRA([moe], None), torch.ones(2, 8, 64, device="cuda").bfloat16()
        with together.adapters([adapters, adapters]), noting(rehearsal, notes, "microbatch"):
            together.set_rows([1, 0])
            moe(x).sum().backward()
    return notes


@scenario
def rl_step_with_critic(_name: str) -> Notes:
    """The controller's own loop: rollouts, rescoring, values, a policy gradient, two updates."""
    from torchtitan.config import ConfigManager
    from torchtitan.rl.controller import Controller
    from torchtitan.rl.job_config import JobConfig

    flags = flags_in("""
        job.config_file=torchtitan/rl/train_configs/copy_cpu.toml training.steps=2 rl.eval_every=0
        rl.num_prompts_per_step=4 rl.num_samples_per_prompt=4 training.local_batch_size=16
        metrics.log_freq=100 rl.advantage.name=gae
    """)
    config = ConfigManager(JobConfig).parse_args([*flags, *common_flags()])
    with ranks(1), rehearsing() as rehearsal:
        controller = Controller(config)
        try:
            controller.train()
        finally:
            controller.close()
        return {"two steps": dict(rehearsal.waits + rehearsal.races)}
