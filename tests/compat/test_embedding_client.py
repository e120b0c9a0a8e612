"""A client in the manner of today's: everything it does itself, on one rank and in layouts of two.

It imports, configures and drives `Trainer` as an RL framework's engine does: process group up
before, `get_train_spec` replaced, attn_type set on the registry, its own masks, its own meshes, its
own loss and step, checkpoints in a folder of its own.
"""

import dataclasses
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torchtitan.config.job_config import (
    Checkpoint,
    JobConfig,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Training,
)
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.qwen3 import get_train_spec, qwen3_args
from torchtitan.testing.gloo import run_ranks
from torchtitan.testing.tiny_jobs import add_tiny_flavors, make_documents, num_valid, pack, run_step
from torchtitan.tools.files import find_shipped

ASSETS = os.path.abspath(find_shipped("tests/assets/tokenizer"))
STEPS = 3
# Documents of a microbatch add up to what context parallelism over two ranks divides.
LENGTHS = (20, 6, 12, 10)
SIZES = (32, 2, 2048)  # dim, layers and vocabulary, as a client finds its flavor by
DEGREES = {
    "one rank": {},
    "FSDP": {"data_parallel_shard_degree": 2},
    "replicas": {"data_parallel_replicate_degree": 2},
    "TP": {"tensor_parallel_degree": 2},
    "CP": {"context_parallel_degree": 2},
}


class Client:
    """degrees: of [parallelism], all others 1. sizes: dim, layers and vocabulary of its flavor.

    sections: of the config, over those that it passes.
    """

    def __init__(self, hf_folder, attn_type, degrees, sizes=SIZES, **sections):
        import torchtitan.protocols.train_spec as train_spec_module
        from torchtitan.train import Trainer

        original = train_spec_module.get_train_spec

        def get_train_spec(name):
            spec = original(name)
            spec.build_dataloader_fn = None
            return spec

        train_spec_module.get_train_spec = get_train_spec
        flavors = get_train_spec("qwen3").model_args
        found = {(args.dim, args.n_layers, args.vocab_size): name for name, args in flavors.items()}
        flavor = found[sizes]
        flavors.get(flavor).attn_type = attn_type
        data_parallel = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
        self.degrees = dict.fromkeys(data_parallel, 1) | degrees
        parts = dict(
            model=Model(name="qwen3", flavor=flavor, hf_assets_path=hf_folder),
            optimizer=Optimizer(name="AdamW", lr=1e-2, eps=1e-3, weight_decay=0.0),
            lr_scheduler=LRScheduler(warmup_steps=0, decay_type="linear", min_lr_factor=0.0),
            parallelism=Parallelism(**self.degrees),
            checkpoint=Checkpoint(
                enable=True,
                initial_load_in_hf=True,
                initial_load_model_only=True,
                initial_load_path=hf_folder,
            ),
        )
        self.trainer = Trainer(JobConfig(**parts | sections))
        (self.model,) = self.trainer.model_parts
        self.dims = ParallelDims(
            dp_shard=self.degrees["data_parallel_shard_degree"],
            dp_replicate=self.degrees["data_parallel_replicate_degree"],
            cp=self.degrees.get("context_parallel_degree", 1),
            tp=self.degrees.get("tensor_parallel_degree", 1),
            pp=1,
            ep=1,
            etp=1,
            world_size=torch.distributed.get_world_size(),
        )
        self.dims.build_mesh()
        splits_data = self.dims.dp_shard > 1 or self.dims.dp_replicate > 1
        name = "fsdp" if self.dims.dp_shard > 1 else "dp_replicate"
        mesh = self.dims.get_optional_mesh(name) if splits_data else None
        self.dp_rank = mesh.get_local_rank() if splits_data else 0
        self.dp_size = mesh.size() if splits_data else 1
        # As its other engines have it, gradients are averaged; those of replicas are by DDP.
        if self.dims.dp_shard > 1:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(float(self.dp_size))
        self.trainer.checkpointer.load()

    def masks(self, positions):
        from torch.nn.attention.flex_attention import and_masks

        from torchtitan.models.attention import (
            VarlenMetadata,
            create_attention_mask,
            get_causal_mask_mod,
        )

        ids = (positions == 0).cumsum(1)
        if self.trainer.model_args.attn_type == "varlen":
            starts = (positions.flatten() == 0).nonzero().flatten()
            ends = F.pad(starts, (0, 1), value=positions.numel()).int()
            longest = int(ends.diff().max())
            return VarlenMetadata(cu_seq_q=ends, cu_seq_k=ends, max_q=longest, max_k=longest)
        n_rows, seq_len = positions.shape
        mask_mod = and_masks(get_causal_mask_mod(), lambda b, h, q, kv: ids[b, q] == ids[b, kv])
        return create_attention_mask(mask_mod, n_rows, None, seq_len, seq_len)

    def forward(self, batch, labels):
        """(log-probabilities, labels) of this rank's tokens."""
        inputs, extra_inputs = batch["input"], {"positions": batch["positions"]}
        extra_kwargs = {"attention_masks": self.masks(batch["positions"])}
        if self.dims.cp_enabled:
            balancer = self.trainer.job_config.parallelism.context_parallel_load_balancer
            others = self.dims.get_mesh("cp"), self.trainer.device, balancer
            inputs, labels, extra_kwargs = prepare_context_parallel_input(
                inputs, labels, extra_kwargs, *others
            )
        with self.trainer.train_context(), self.trainer.maybe_enable_amp:
            logits = self.model(inputs, **extra_inputs, **extra_kwargs)
        assert isinstance(logits, DTensor) == self.dims.tp_enabled
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return -losses, labels

    def train_step(self, documents):
        """(loss of the whole batch, gradient norm)."""
        own = documents[self.dp_rank :: self.dp_size]
        total = torch.zeros(())
        for part in (own[::2], own[1::2]):
            batch, labels = pack(part)
            logprobs, _ = self.forward(batch, labels)
            loss = -logprobs.sum() / num_valid(documents)
            total += loss.detach()
            (loss * self.dp_size).backward()
        loss_mesh = self.dims.get_optional_mesh("loss")
        if loss_mesh is not None:
            torch.distributed.all_reduce(total, group=loss_mesh.get_group())
        return total.item(), self.optimizer_step().item()

    def optimizer_step(self):
        """The norm of all gradients, which are clipped."""
        norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()),
            self.trainer.job_config.training.max_norm,
            foreach=True,
            pp_mesh=self.dims.get_optional_mesh("pp"),
            ep_enabled=self.dims.ep_enabled,
        )
        assert torch.isfinite(norm)
        self.trainer.optimizers.step()
        self.trainer.lr_schedulers.step()
        self.trainer.optimizers.zero_grad()
        return norm

    def padded_forward(self, documents):
        """Log-probabilities of each document, as rows of a padded batch with a dense mask."""
        longest = max(map(len, documents))
        rows = [F.pad(d, (0, longest - len(d))) for d in documents]
        mask = torch.stack([torch.arange(longest) < len(d) for d in documents]).to(torch.int32)
        with torch.no_grad(), self.trainer.train_context(), self.trainer.maybe_enable_amp:
            logits = self.model(
                torch.stack(rows), positions=(mask.cumsum(1) - 1) * mask, attention_masks=mask
            )
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        return [
            logits[i, : len(d) - 1].log_softmax(-1).gather(-1, d[1:, None]).squeeze(-1)
            for i, d in enumerate(documents)
        ]


def run_under_autocast(hf_folder, attn_type, name, expected):
    """A client's own bf16 autocast around maybe_enable_amp: fp32's log-probabilities to 5e-2."""
    training = Training(mixed_precision_param="bfloat16")
    client = Client(hf_folder, attn_type, DEGREES[name], training=training)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, labels = client.forward(*pack(make_documents(0, LENGTHS)))
    logprobs = logprobs[labels.flatten() >= 0]
    torch.testing.assert_close(logprobs.float(), expected, rtol=0, atol=5e-2)
    (-logprobs.sum()).backward()
    for parameter in client.model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()
    client.trainer.close()


def run_client(folder, hf_folder, attn_type, name):
    """(losses and norms of steps, log-probabilities of padded rows) that one client sees."""
    training = Training(mixed_precision_param="float32")
    client = Client(hf_folder, attn_type, DEGREES[name], training=training)
    trainer = client.trainer
    assert isinstance(client.model, FSDPModule)
    assert trainer.dataloader is None
    documents = make_documents(0, LENGTHS)
    padded = [] if client.dims.cp_enabled else client.padded_forward(documents)
    if padded:
        with torch.no_grad():
            logprobs, labels = client.forward(*pack(documents))
        expected = logprobs[labels.flatten() >= 0]
        torch.testing.assert_close(torch.cat(padded), expected, rtol=0, atol=5e-6)
        run_under_autocast(hf_folder, attn_type, name, expected)
    record = [client.train_step(make_documents(step, LENGTHS)) for step in range(STEPS)]
    # One document longer than training.seq_len, which the client cannot set.
    assert trainer.job_config.training.seq_len == 2048
    long = pack(make_documents(9, (2052,)))
    with torch.no_grad():
        logprobs, labels = client.forward(*long)
        assert logprobs[labels.flatten() >= 0].isfinite().all()

    states = list(trainer.optimizers.state.values())
    assert len(states) == len(list(client.model.parameters()))
    assert all(group["params"] for group in trainer.optimizers.param_groups)
    # Evaluation, then save, in a folder of its own; then back to where it was.
    client.model.eval()
    with torch.no_grad():
        client.forward(*pack(documents))
    client.model.reshard()
    client.model.train()
    trainer.checkpointer.folder = f"{folder}/actor"
    trainer.checkpointer.keep_latest_k = 1
    trainer.checkpointer.save(curr_step=STEPS)
    after = [client.train_step(make_documents(10 + i, LENGTHS)) for i in range(2)]
    assert trainer.checkpointer.load(step=STEPS)
    again = [client.train_step(make_documents(10 + i, LENGTHS)) for i in range(2)]
    assert again == after
    if name == "replicas":  # an engine's step sums gradients, though the client's backward averages
        assert trainer.checkpointer.load(step=STEPS)
        of_engine = run_step(trainer, make_documents(10, LENGTHS), num_microbatches=4)
        torch.testing.assert_close(of_engine, after[0], rtol=1e-5, atol=0)
    assert trainer.lr_schedulers.schedulers[0].get_last_lr()[0] > 0
    assert (Path(folder) / "actor" / f"step-{STEPS}").is_dir()
    trainer.close()
    return record, padded


def make_hf_folder(folder):
    """Weights and tokenizer as Hugging Face has them; the same on every rank."""
    path = Path(folder) / "hf"
    if torch.distributed.get_rank() == 0:
        shutil.copytree(ASSETS, path)
        spec = get_train_spec()
        args = spec.model_args["client"]
        torch.manual_seed(3)
        model = spec.model_cls(args)
        with torch.no_grad():
            model.init_weights()
        weights = spec.state_dict_adapter(args, None).to_hf(model.state_dict())
        save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors")
    torch.distributed.barrier()
    return str(path)


CASES = {
    1: [("one rank", "flex"), ("one rank", "varlen")],
    2: [("FSDP", "flex"), ("replicas", "flex"), ("TP", "varlen"), ("CP", "flex"), ("CP", "varlen")],
}


def run_clients(folder, cases):
    """One after the other in one process, so that their replacements of `get_train_spec` nest."""
    os.chdir(folder)  # clients leave job.dump_folder at its default
    add_tiny_flavors()
    qwen3_args["client"] = dataclasses.replace(qwen3_args["tiny"], vocab_size=SIZES[2])
    hf_folder = make_hf_folder(folder)
    return {
        case: run_client(f"{folder}/{'_'.join(case)}", hf_folder, *case[::-1]) for case in cases
    }


def test_unchanged_client_sees_the_same_in_every_layout(tmp_path):
    results = {}
    for world_size, cases in CASES.items():
        folder = tmp_path / f"{world_size}_ranks"
        folder.mkdir()
        results |= run_ranks(run_clients, world_size, str(folder), cases, timeout_seconds=300)[0]
    expected_steps, expected_padded = results["one rank", "flex"]
    for case, (steps, padded) in results.items():
        torch.testing.assert_close(steps, expected_steps, rtol=1e-5, atol=0, msg=str(case))
        if padded:
            torch.testing.assert_close(padded, expected_padded, rtol=0, atol=5e-6, msg=str(case))
