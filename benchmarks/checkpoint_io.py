"""What saving, loading and exporting cost beside the plain ways, in one process and on two FSDP ranks.

    python benchmarks/checkpoint_io.py [--layers 12] [--rounds 3] [--folder /tmp]

Ours and the plain way take turns, round by round, and the best round of each counts; a time is that of the
slower rank. The plain ways: `dcp.save` and `dcp.load` of the same weights and optimizer (torch's nested
state dict, without hashes), and transformers' `save_pretrained`, which FSDP ranks do with a gathered state
dict. Memory is an export's peak on the rank that needs most, beside the weights of one process.

Weights are filled with a repeated block of numbers; 12 layers take 0.57 GB, and a save 1.7 GB on the disk.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GB, print_header, print_row, status_bytes
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero, num_ranks
from torchtitan.testing.gloo import run_ranks

EXPORT, SAVE, LOAD = "export to Hugging Face", "synchronous save", "load"


def hf_config(layers: int) -> dict[str, Any]:
    return dict(
        model_type="llama", hidden_size=768, intermediate_size=2304, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=4, vocab_size=32768, rms_norm_eps=1e-5,
        max_position_embeddings=2048, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def build(layers: int, folder: str) -> tuple[torch.nn.Module, Any, Any, torch.nn.Module | None]:
    """(model, manager, optimizers, transformers' model or None beside FSDP)"""
    from transformers import AutoConfig, AutoModelForCausalLM

    from torchtitan.checkpoint.manager import CheckpointManager
    from torchtitan.config.job_config import Checkpoint
    from torchtitan.models.hf_config import from_hf_config
    from torchtitan.optim.lr_scheduler import LRSchedulersContainer
    from torchtitan.optim.optimizer import OptimizersContainer
    from torchtitan.protocols.train_spec import get_train_spec

    family, _, args = from_hf_config(hf_config(layers))
    spec = get_train_spec(family)
    with torch.device("meta"):
        model = spec.model_cls(args)
        kwargs = {k: v for k, v in hf_config(layers).items() if k != "model_type"}
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **kwargs))
    if num_ranks() > 1:
        mesh = init_device_mesh("cpu", (num_ranks(),))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        theirs = theirs.to_empty(device="cpu")
    model = model.to_empty(device="cpu")
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    for parameter in [*model.parameters(), *(theirs.parameters() if num_ranks() == 1 else ())]:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        for piece in local.detach().view(-1).split(block.numel()):
            piece.copy_(block[: piece.numel()])
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    optimizers.zero_grad()
    manager = CheckpointManager(
        dataloader=None, model_parts=[model], optimizers=optimizers, states={}, base_folder=folder,
        lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1.0),
        checkpoint_config=Checkpoint(enable=True),
        sd_adapter=spec.state_dict_adapter(args, None),
    )  # fmt: skip
    return model, manager, optimizers, theirs


def measure(layers: int, rounds: int, folder: str) -> dict[str, Any]:
    """Best seconds of (case, whose), bytes of a state and of the weights, peaks of (case, whose)."""
    model, manager, optimizers, theirs = build(layers, folder)
    ours, plain, hf, their_hf = (f"{folder}/{name}" for name in ("step", "plain", "hf", "their_hf"))

    def state() -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(model, list(optimizers))
        return {"model": get_model_state_dict(model), "optimizer": optimizer}

    def export_plainly() -> None:
        if num_ranks() == 1:
            theirs.save_pretrained(their_hf)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            theirs.save_pretrained(their_hf, state_dict=manager.sd_adapter.to_hf(whole))
        dist.barrier()

    def load_plainly() -> None:
        saved = state()
        dcp.load(saved, checkpoint_id=plain)
        model.load_state_dict(saved["model"], strict=False)

    cases: dict[tuple[str, str], Callable[[], Any]] = {
        (EXPORT, "plain"): export_plainly,
        (EXPORT, "ours"): lambda: manager.save_hf(hf),
        (SAVE, "plain"): lambda: dcp.save(state(), checkpoint_id=plain),
        (SAVE, "ours"): lambda: manager.save(1, path=ours),
        (LOAD, "plain"): load_plainly,
        (LOAD, "ours"): lambda: manager.load(path=ours),
    }
    best, peaks = dict.fromkeys(cases, float("inf")), dict.fromkeys(cases, 0)
    for _ in range(rounds):
        for key, case in cases.items():
            if key[0] != LOAD:
                target = {EXPORT: (their_hf, hf), SAVE: (plain, ours)}[key[0]][key[1] == "ours"]
                from_rank_zero(lambda: shutil.rmtree(target, ignore_errors=True))  # noqa: B023
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = status_bytes("VmHWM")
            started = time.perf_counter()
            case()
            best[key] = min(best[key], max(all_ranks(time.perf_counter() - started)))
            peaks[key] = max(peaks[key], *all_ranks(status_bytes("VmHWM") - before))
    manager.close()
    n_bytes = sum(p.nbytes for p in model.parameters())
    return {"best": best, "peaks": peaks, "weights": n_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="where to write; default: the system's temporary folder")
    args = parser.parse_args()
    titles = "ours, s/GB", "plain, s/GB", "ratio", "memory / weights, ours", "plain"
    print_header("ranks", "case", *titles)
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found = run_ranks(
                measure, ranks, args.layers, args.rounds, folder, timeout_seconds=3600,
                init_process_group=ranks > 1,
            )[0]  # fmt: skip
        for case in (EXPORT, SAVE, LOAD):
            n_bytes = found["weights"] * (1 if case == EXPORT else 3)
            ours, plain = (found["best"][case, who] / n_bytes * GB for who in ("ours", "plain"))
            peaks = (found["peaks"][case, who] / found["weights"] for who in ("ours", "plain"))
            memory = (f"{1 / ranks + peak:.2f}" for peak in peaks)
            print_row(ranks, case, f"{ours:.2f}", f"{plain:.2f}", f"{ours / plain:.2f}", *memory)


if __name__ == "__main__":
    main()
