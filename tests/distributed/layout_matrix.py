"""Layouts as data, and what a run in one of them is measured by.

A run feeds the same global batches to a `TrainingEngine` in some layout: rows with unequally many
valid tokens, whole or packed with documents. Its losses, gradients, gradient norms, and weights
and optimizer state after three steps have to be those of one process.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from tests.reliability.jobs import flags_in
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.distributed.tied_copies import FIRST, name_in_whole_model, trained_copies_in
from torchtitan.models.causal_lm import CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.llama3 import Llama3StateDictAdapter
from torchtitan.models.moe import MoEArgs
from torchtitan.models.rope import RoPEArgs
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.torch_parts import name_without_wrappers

STEPS = 3
ROWS, SEQ_LEN, VOCAB = 8, 32, 2048


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks share the work of one global batch; `extra` are further command line flags."""

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    accumulation: int = 1
    extra: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str) -> "Layout":
        """A name lists degrees, schedules and modes: "FSDP 2, PP 2, LoopedBFS, full AC"."""
        sizes, extra = {}, []
        for part in name.split(", "):
            axis, _, degree = part.rpartition(" ")
            if axis in _AXES:
                degrees = map(int, degree.split("x"))
                sizes |= dict(zip(_AXES[axis].split(), degrees, strict=True))
            else:
                extra += _MODES.get(part) or [f"--parallelism.pipeline_parallel_schedule={part}"]
        return cls(name, extra=tuple(extra), **sizes)

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    def overrides(self) -> list[str]:
        local_batch_size = ROWS // (self.dp_replicate * self.dp_shard * self.accumulation)
        degrees = dict(
            data_parallel_replicate=self.dp_replicate, data_parallel_shard=self.dp_shard,
            tensor_parallel=self.tp, pipeline_parallel=self.pp, context_parallel=self.cp,
            expert_parallel=self.ep, expert_tensor_parallel=self.etp,
        )  # fmt: skip
        return [
            *(f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()),
            f"--training.local_batch_size={local_batch_size}",
            f"--training.global_batch_size={ROWS}",
            *self.extra,
        ]


_AXES = dict(
    DDP="dp_replicate", FSDP="dp_shard", HSDP="dp_replicate dp_shard", TP="tp", PP="pp", CP="cp",
    EP="ep", ETP="etp", accumulation="accumulation",
)  # fmt: skip
_AC = "--activation_checkpoint"
_MODES = {
    "alltoall": ["--parallelism.context_parallel_rotate_method=alltoall"],
    "whole logits": ["--parallelism.disable_loss_parallel"],
    "full AC": [f"{_AC}.mode=full"],
    "op AC": [f"{_AC}.mode=selective", f"{_AC}.selective_ac_option=op"],
}


def _layouts(names: str) -> list[Layout]:
    return [Layout.named(" ".join(name.split())) for name in names.split(";")]


LAYOUTS = _layouts("""
    FSDP 2; DDP 2; accumulation 4; FSDP 2, accumulation 2, full AC; TP 2; TP 2, whole logits, op AC;
    CP 2; CP 2, alltoall, full AC; PP 2, 1F1B; PP 2, GPipe, accumulation 2; PP 2, Interleaved1F1B;
    PP 2, LoopedBFS; PP 2, InterleavedZeroBubble; PP 2, ZBVZeroBubble; FSDP 4; HSDP 2x2;
    FSDP 2, TP 2; DDP 2, TP 2; HSDP 2x2, TP 2; FSDP 2, CP 2; DDP 2, CP 2, alltoall; TP 2, CP 2;
    FSDP 2, PP 2; TP 2, PP 2, Interleaved1F1B; TP 2, PP 2, ZBVZeroBubble; CP 2, PP 2; PP 4, 1F1B; CP 4
""")
MOE_LAYOUTS = _layouts("""
    FSDP 2, EP 2; TP 2, EP 2; FSDP 2, TP 2, EP 2, ETP 2; CP 2, EP 2; FSDP 4, EP 2;
    FSDP 4, EP 4, full AC; HSDP 2x2, EP 2; FSDP 2, TP 2, EP 4; FSDP 2, PP 2, EP 2;
    TP 2, PP 2, CP 2, EP 2; FSDP 2, TP 2, PP 2, EP 2, ETP 2
""")
ONE_PROCESS = Layout("1 process")
BY_NAME = {layout.name: layout for layout in [ONE_PROCESS, *LAYOUTS, *MOE_LAYOUTS]}
# fp32: the order of summation differs between layouts. Losses and norms are sums of many terms.
TOLERANCES = dict(loss=1e-6, grad_norm=1e-6, gradient=1e-5, weights=1e-5, optimizer_state=1e-5)
TOLERANCES["expert_bias"] = 0.0
_CASES_PER_SPAWN = 4

# Without its eps AdamW makes steps of full size from gradients that are rounding errors.
SETTINGS = flags_in(f"""
    training.seq_len={SEQ_LEN} training.mixed_precision_param=float32 training.max_norm=0.5
    activation_checkpoint.mode=none lr_scheduler.warmup_steps=0 optimizer.lr=1e-3
    optimizer.eps=1e-3 debug.seed=7
""")
_SIZES = dict(dim=64, n_layers=4, n_heads=4, vocab_size=VOCAB)
_HEADS = _SIZES | dict(n_kv_heads=2, head_dim=16)
_QWEN3 = _HEADS | dict(hidden_dim=128, enable_weight_tying=False)
_DEEPSEEK = _SIZES | dict(
    inter_dim=128, moe_inter_dim=32, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
# Layers 1 and 3 have experts; layer 2 has no RoPE and sees past the chunks of 8 tokens.
_LLAMA4 = _SIZES | dict(
    n_kv_heads=2, hidden_dim=128, moe_inter_dim=32, every_n_layers_nope=3, use_qk_norm=True,
    fixed_attn_block_size=8, attn_temperature_tuning=True, floor_scale=4,
)  # fmt: skip
_GPT_OSS = _HEADS | dict(moe_inter_dim=32, sliding_window_size=8)
_BIASES = _SIZES | dict(n_kv_heads=2, attention_bias=True, mlp_bias=True)
_QWEN3_MOE = _HEADS | {"moe_inter_dim": 32}
_TWO = MoEArgs(num_experts=2, num_shared_experts=1, score_func="softmax", use_grouped_mm=False)
_MIXED = _DEEPSEEK | dict(n_layers=2, n_dense_layers=1)
_FACTS = _HEADS | dict(hidden_dim=128)
# Layers of two head sizes, the larger of which have no weights for values.
_GEMMA4 = _FACTS | dict(
    logits_cap=3.0, softmax_scale=0.3, embedding_scale=8.0,
    layer_kinds={
        "local": LayerKind(RoPEArgs(theta=1e3), window=7, n_kv_heads=4),
        "global": LayerKind(
            RoPEArgs(theta=1e5, share=0.5, proportional=True), head_dim=32, values_from_keys=True
        ),
    },
    layer_types=("local", "global") * 2,
)  # fmt: skip
_GATES_AND_SCALES = _FACTS | dict(
    attention_gate=True, query_scale=0.1, query_scale_length=4, residual_scale=0.5, logits_divisor=2.0,
    v_norm=True,
    layer_kinds={
        "partial": LayerKind(RoPEArgs(share=0.5)),
        "none": LayerKind(rope=None, head_dim=8, n_kv_heads=4, values_from_keys=True),
    },
    layer_types=("partial", "none") * 2,
)  # fmt: skip
_QWEN3_5 = _FACTS | dict(
    linear_key_heads=4, linear_value_heads=8, linear_key_dim=8, linear_value_dim=12,
    layer_types=("linear_attention", "full_attention") * 2,
)  # fmt: skip
# family -> (model.name, flavor, changes)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", _SIZES | {"n_kv_heads": 2}),
    "qwen3": ("qwen3", "debugmodel", _QWEN3),
    "qwen3 MoE": ("qwen3", "debugmodel_moe_small", _QWEN3_MOE),
    "deepseek_v3": ("deepseek_v3", "debugmodel", _DEEPSEEK),
    "llama4": ("llama4", "debugmodel_irope", _LLAMA4),
    "gpt_oss": ("gpt_oss", "debugmodel_small", _GPT_OSS),
    "qwen3, tied": ("qwen3", "debugmodel", _QWEN3 | {"enable_weight_tying": True}),
    "one dense layer, one of experts": ("deepseek_v3", "debugmodel", _MIXED),
    "llama3, biases": ("llama3", "debugmodel", _BIASES),
    "olmo2": ("olmo", "debugmodel", _FACTS),
    "gemma4": ("gemma4", "debugmodel", _GEMMA4),
    "qwen3_5": ("qwen3_5", "debugmodel", _QWEN3_5),
    "qwen3_5 MoE": ("qwen3_5", "debugmodel_moe", _QWEN3_5 | {"moe_inter_dim": 32}),
    "gates and scales": ("causal_lm", "debugmodel", _GATES_AND_SCALES),
    "qwen3 MoE, two experts": ("qwen3", "debugmodel_moe_small", _QWEN3_MOE | {"moe_args": _TWO}),
}
MOE_FAMILIES = ["qwen3_5 MoE", "qwen3 MoE", "qwen3 MoE, two experts"]
MOE_FAMILIES += ["deepseek_v3", "llama4", "gpt_oss"]
# A flag for fewer layers, one of each kind, where more would prove nothing else.
SHALLOW = "--model.flavor=shallow"


def shallow(layout: Layout) -> Layout:
    return dataclasses.replace(layout, extra=(*layout.extra, SHALLOW))


def needs_four_layers(layout: Layout) -> bool:
    """One for each of four stages."""
    return any("Interleaved" in flag or "ZBV" in flag for flag in layout.extra)


# rows -> flags
BATCHES = {
    "whole rows": ["--model.attn_type=sdpa", "--model.attn_mask_type=causal"],
    "documents, varlen": [
        "--model.attn_type=varlen",
        "--model.attn_mask_type=position_block_causal",
    ],
    "documents, flex": ["--model.attn_type=flex", "--model.attn_mask_type=position_block_causal"],
}
REPLAYED = ", experts replayed"  # behind an entry of BATCHES: batches say which experts to take
# Windows, sinks and chunks are beyond sdpa: whole rows of these families go through flex.
_WITHOUT_SDPA = {"llama4", "gpt_oss", "gemma4"}


class DealtRows(BaseDataLoader):
    """Random rows; each data-parallel rank gets its share of every global batch.

    Labels are ignored at random, and more in some rows than in others, so that ranks and
    microbatches hold unequal numbers of valid tokens.
    with_positions: the rows are packed documents of random lengths.
    """

    def __init__(self, dp_rank, dp_size, local_batch_size, seq_len, with_positions=False):
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.with_positions = with_positions
        self.local_batch_size, self.seq_len = local_batch_size, seq_len
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self.num_batches * self.dp_size + self.dp_rank) * self.local_batch_size
            self.num_batches += 1
            indices = range(first, first + self.local_batch_size)
            rows = [self._row(index) for index in indices]
            batch = {"input": torch.stack([tokens[:-1] for tokens, _ in rows])}
            if self.with_positions:
                batch["positions"] = torch.stack([self._positions(index) for index in indices])
            yield batch, torch.stack([labels for _, labels in rows])

    def _row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 2048, (self.seq_len + 1,), generator=generator)
        labels = tokens[1:].clone()
        share_ignored = 0.1 + 0.2 * (index % 4)
        labels[torch.rand(self.seq_len, generator=generator) < share_ignored] = IGNORE_INDEX
        return tokens, labels

    def _positions(self, index: int) -> torch.Tensor:
        """Restart with every document, and with more of them in some rows than in others."""
        generator = torch.Generator().manual_seed(index)
        is_start = torch.rand(self.seq_len, generator=generator) < 0.1 * (index % 4)
        columns = torch.arange(self.seq_len)
        return columns - torch.where(is_start, columns, 0).cummax(0).values

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


def build_dealt_rows(dp_world_size, dp_rank, tokenizer, job_config) -> DealtRows:
    training, mask_type = job_config.training, job_config.model.attn_mask_type
    sizes = dp_rank, dp_world_size, training.local_batch_size, training.seq_len
    return DealtRows(*sizes, with_positions=mask_type == "position_block_causal")


@dataclasses.dataclass
class Run:
    """What one run gave; tensors are whole, by the name of their parameter."""

    hashes: dict[str, str]
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    optimizer_state: dict[str, torch.Tensor]
    expert_bias: dict[str, torch.Tensor]


def register_tiny(family: str) -> str:
    """Register a family with two flavors, `tiny` and `shallow`; returns its model.name."""
    from torchtitan.protocols import train_spec

    model_name, flavor, changes = FAMILIES[family]
    name = f"tiny_{re.sub('[^a-z0-9]+', '_', family.lower())}"
    if name not in train_spec._extra_train_specs:
        if model_name == "causal_lm":
            flavors = {flavor: CausalLMArgs()}
            spec = build_decoder_train_spec(CausalLM, flavors, Llama3StateDictAdapter)
        else:
            spec = train_spec.get_train_spec(model_name)
        args = dataclasses.replace(spec.model_args[flavor], **changes)
        n_layers = 3 if family == "llama4" else 2
        fewer = {"layer_types": args.layer_types[:n_layers]} if hasattr(args, "layer_types") else {}
        shallow = dataclasses.replace(args, n_layers=n_layers, **fewer)
        changes = dict(model_args={"tiny": args, "shallow": shallow}, build_tokenizer_fn=None)
        spec = dataclasses.replace(spec, build_dataloader_fn=build_dealt_rows, **changes)
        train_spec.register_train_spec(name, spec)
    return name


def batch_flags(family: str, batch: str) -> list[str]:
    """Flags of an entry of BATCHES, in the kernel that the family has for it."""
    flags = BATCHES[batch.removesuffix(REPLAYED)]
    if family not in _WITHOUT_SDPA:
        return flags
    return [flag.replace("attn_type=sdpa", "attn_type=flex") for flag in flags]


def config_of(family: str, flags: list[str], dump_folder: str):
    from torchtitan.config import ConfigManager

    model = [f"--model.name={register_tiny(family)}", "--model.flavor=tiny"]
    return ConfigManager().parse_args(
        [*model, f"--job.dump_folder={dump_folder}", *SETTINGS, *flags]
    )


def build_engine(family: str, flags: list[str], dump_folder: str):
    from torchtitan.engine import TrainingEngine

    return TrainingEngine(config_of(family, flags, dump_folder))


def global_batch(step: int, with_positions: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows [ROWS, SEQ_LEN] of a step, the same in every layout."""
    rows = DealtRows(0, 1, ROWS, SEQ_LEN, with_positions)
    rows.num_batches = step
    return next(iter(rows))


def random_experts(model, step: int) -> torch.Tensor:
    """Experts for the rows of a step [ROWS, SEQ_LEN, L, k]; a quarter of the tokens has none.

    In step 1 all tokens have the first experts, so some ranks get no tokens.
    """
    args, n_moe = model.model_args.moe_args, len(model.moe_layers)
    if step == 1:
        return torch.arange(args.top_k).repeat(ROWS, SEQ_LEN, n_moe, 1)
    generator = torch.Generator().manual_seed(step)
    noise = torch.rand(ROWS, SEQ_LEN, n_moe, args.num_experts, generator=generator)
    experts = noise.argsort(dim=-1)[..., : args.top_k].to(torch.int16)
    experts[torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.25] = -1
    return experts


def own_rows(engine) -> slice:
    n_rows = ROWS // engine.dp_size
    return slice(engine.dp_rank * n_rows, (engine.dp_rank + 1) * n_rows)


def run_step(engine, layout: Layout, step: int, replays: bool = False) -> float:
    """Forward and backward of this rank's share; returns the loss of the global batch."""
    from torchtitan.distributed.utils import dist_sum

    batch, labels = global_batch(step, engine.packing.separates_documents)
    labels = engine.packing.mask_labels(batch, labels)
    if replays:
        batch = batch | {"routed_experts": random_experts(engine.model_parts[0], step)}
    num_valid = int((labels != IGNORE_INDEX).sum())
    n_rows = ROWS // (engine.dp_size * layout.accumulation)
    loss = 0.0
    for index in range(layout.accumulation):
        first = (engine.dp_rank * layout.accumulation + index) * n_rows
        loss += engine.forward_backward_step(
            input_dict={key: value[first : first + n_rows] for key, value in batch.items()},
            labels=labels[first : first + n_rows],
            global_valid_tokens=num_valid,
        )
    return dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))


def measure_on_rank(
    layout: Layout, family: str, batch: str, dump_folder: str, flags: tuple[str, ...] = ()
) -> Run:
    """One run; every rank has the tensors of its own pipeline stages.

    The second copy of a tied embedding has the first one's name; `_merge` compares the two.
    """
    engine = build_engine(
        family, [*layout.overrides(), *batch_flags(family, batch), *flags], dump_folder
    )
    named = named_parameters(engine)
    hashes = {name: hash_of(whole(parameter)) for name, parameter in named}
    losses, grad_norms, gradients = [], [], {}
    for step in range(STEPS):
        losses.append(run_step(engine, layout, step, batch.endswith(REPLAYED)))
        if step == 0:
            gradients = gradients_of(engine)
            assert_equal_copies(engine, lambda copy: copy.grad)
        grad_norms.append(float(whole(engine.optim_step().grad_norm)))
    assert_equal_copies(engine, lambda copy: copy)
    weights = {name: whole(parameter) for name, parameter in named}
    state = engine.optimizers.state_dict().items()
    moments = ("exp_avg", "_sq", "momentum_buffer")
    optimizer_state = {key: whole(value) for key, value in state if key.endswith(moments)}
    expert_bias = {
        name_without_wrappers(name): whole(value)
        for part in engine.model_parts
        for name, value in part.named_buffers()
        if name.endswith("expert_bias")
    }
    engine.close()
    return Run(hashes, losses, grad_norms, gradients, weights, optimizer_state, expert_bias)


def named_parameters(engine) -> list[tuple[str, torch.nn.Parameter]]:
    """Those of this rank's stages, by their names in the whole model."""
    return [
        (name_in_whole_model(part, name_without_wrappers(name)), parameter)
        for part in engine.model_parts
        for name, parameter in part.named_parameters()
    ]


def gradients_of(engine) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad) for n, p in named_parameters(engine) if p.grad is not None}


def assert_equal_copies(engine, tensor_of) -> None:
    """Of a tied embedding, where one rank has both copies: bit for bit."""
    copies = trained_copies_in(engine.model_parts)
    assert all(torch.equal(whole(tensor_of(copy)), whole(tensor_of(copies[0]))) for copy in copies)


def measure(
    layout: Layout,
    cases: list[tuple[str, str]],
    dump_folder: str,
    flags: tuple[str, ...] = (),
    on_accelerators: bool = False,
) -> list[Run]:
    """One run per (family, batch), the tensors of all ranks together; on the host."""
    runs = []
    # A few at a time: process groups of engines that are closed keep their threads.
    how = dict(timeout_seconds=600, on_accelerators=on_accelerators)
    for first in range(0, len(cases), _CASES_PER_SPAWN):
        given = layout, cases[first : first + _CASES_PER_SPAWN], dump_folder, flags
        ranks = run_ranks(_measure_cases, layout.world_size, *given, **how)
        runs += [_merge(runs) for runs in zip(*ranks, strict=True)]
    return runs


def _measure_cases(
    layout: Layout, cases: list[tuple[str, str]], dump_folder: str, flags: tuple[str, ...]
) -> list[Run]:
    return [measure_on_rank(layout, *case, dump_folder, flags) for case in cases]


def _merge(runs: tuple[Run, ...]) -> Run:
    first = runs[0]
    for run in runs[1:]:
        assert run.losses == first.losses, "ranks report different losses"
        assert run.grad_norms == first.grad_norms, "ranks report different gradient norms"
        if FIRST in first.weights and FIRST in run.weights:
            assert run.hashes[FIRST] == first.hashes[FIRST]
            if FIRST in first.gradients:
                assert torch.equal(run.gradients[FIRST], first.gradients[FIRST])
            assert torch.equal(run.weights[FIRST], first.weights[FIRST])
        for field in ("hashes", "gradients", "weights", "optimizer_state", "expert_bias"):
            getattr(first, field).update(getattr(run, field))
    return first


def differences(run: Run, expected: Run) -> dict[str, float]:
    """The largest difference of each kind, relative to the largest number of the same tensor."""
    return {
        "loss": _relative(torch.tensor(run.losses), torch.tensor(expected.losses)),
        "grad_norm": _relative(torch.tensor(run.grad_norms), torch.tensor(expected.grad_norms)),
        "gradient": _largest(run.gradients, expected.gradients),
        "weights": _largest(run.weights, expected.weights),
        "optimizer_state": _largest(run.optimizer_state, expected.optimizer_state),
        "expert_bias": _largest(run.expert_bias, expected.expert_bias),
    }


def assert_same_numbers(run: Run, expected: Run, case: Any, factor: float = 1.0) -> None:
    """factor: of the tolerances."""
    assert run.hashes == expected.hashes, f"{case}: initial weights differ"
    for kind, difference in differences(run, expected).items():
        assert difference <= factor * TOLERANCES[kind], (
            f"{case}: {kind} differs by {difference:.1e}"
        )


def _largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max((_relative(ours[name], theirs[name]) for name in theirs), default=0.0)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = theirs.abs().max().item()
    return (ours - theirs).abs().max().item() / (scale or 1.0)


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().to("cpu", copy=True)


def hash_of(x: torch.Tensor) -> str:
    return hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
