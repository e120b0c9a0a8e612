"""Checkpoints of adapters: small, without their base, and for every number of ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    SHALLOW,
    Layout,
    batch_flags,
    build_engine,
    run_step,
    whole,
)
from tests.reliability.jobs import TINY_JOB
from torchtitan.config import ConfigManager
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools import bounded
from torchtitan.trainer import Trainer

FLAGS = [
    "--model.converters=lora",
    "--lora.rank=4",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
]
FSDP_2 = Layout("FSDP 2", dp_shard=2)
PP_2 = Layout("PP 2", pp=2)
TP_2 = Layout("TP 2", tp=2)


def train(layout, folder, first, last, *flags):
    """Continue from the newest checkpoint, and save after step `last`; return losses and weights."""
    engine = build_engine("llama3", [*FLAGS, SHALLOW, *layout.overrides(), *flags], folder)
    with engine:
        assert engine.load() == (first > 0)
        assert engine.weights_version == first
        losses = []
        for step in range(first, last):
            losses.append(run_step(engine, layout, step))
            engine.optim_step()
        if last > first:
            engine.save()
        part = engine.model_parts
        weights = {n: whole(p) for x in part for n, p in x.named_parameters() if p.requires_grad}
    return losses, weights


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return train(ONE_PROCESS, str(tmp_path_factory.mktemp("unbroken")), 0, 6)


def test_resumed_run_repeats_the_unbroken_one_bitwise(unbroken, tmp_path):
    losses, _ = train(ONE_PROCESS, str(tmp_path), 0, 3)
    later, weights = train(ONE_PROCESS, str(tmp_path), 3, 6)
    assert losses + later == unbroken[0]
    assert all(torch.equal(weights[name], unbroken[1][name]) for name in unbroken[1])
    saved = FileSystemReader(tmp_path / "checkpoint/step-6").read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith(("layers", "tok", "norm", "out"))} == set(
        weights
    )
    moments = {f"optimizer.state.{name}.{kind}" for name in weights for kind in ("exp_avg", "step")}
    assert moments <= saved.keys()


def test_saved_by_one_rank_continues_on_two(unbroken, tmp_path):
    losses, first = [], 0
    for layout, last in ((ONE_PROCESS, 2), (FSDP_2, 3), (PP_2, 4)):
        runs = run_ranks(train, layout.world_size, layout, str(tmp_path), first, last)
        losses += runs[0][0]
        first = last
    # fp32: the order of summation differs between layouts.
    assert losses == pytest.approx(unbroken[0][:4], rel=1e-6)


def test_another_base_is_refused_by_its_digest(tmp_path):
    train(ONE_PROCESS, str(tmp_path), 0, 1)
    with pytest.raises(ValueError, match="trained on another base model") as error:
        train(ONE_PROCESS, str(tmp_path), 1, 2, "--debug.seed=8")
    assert "initial weights" in str(error.value)


def export(layout, family, folder, path):
    """Load the newest checkpoint, and write it in PEFT's format and merged; then read it again."""
    flags = [*FLAGS, SHALLOW, *layout.overrides(), *batch_flags(family, "whole rows")]
    with build_engine(family, flags, folder) as engine:
        if not engine.load():
            run_step(engine, layout, 0)
            engine.optim_step()
            engine.save()
        engine.save_peft(f"{path}/adapters")
        engine.save_hf(f"{path}/merged")
        before = [p.clone() for part in engine.model_parts for p in part.parameters()]
        run_step(engine, layout, 0)
        engine.optim_step()
        engine.load_peft(f"{path}/adapters")
        after = [p for part in engine.model_parts for p in part.parameters()]
        assert all(torch.equal(*map(whole, pair)) for pair in zip(before, after, strict=True))


FOUR_RANKS = [
    Layout("FSDP 4, EP 2", dp_shard=4, ep=2),
    Layout("FSDP 2, TP 2, EP 2, ETP 2", dp_shard=2, tp=2, ep=2, etp=2),
    Layout("FSDP 2, PP 2, EP 2", dp_shard=2, pp=2, ep=2),
]


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama3", [TP_2, PP_2]),
        ("qwen3_5", [TP_2, FSDP_2]),  # joined weights
        pytest.param("qwen3 MoE", FOUR_RANKS, marks=pytest.mark.slow),
    ],
)
def test_ranks_write_the_files_of_one_bitwise(family, layouts, tmp_path):
    folder = str(tmp_path)
    export(ONE_PROCESS, family, folder, f"{folder}/one")
    for number, layout in enumerate(layouts):
        run_ranks(export, layout.world_size, layout, family, folder, f"{folder}/{number}")
        for kind in ("adapters", "merged"):
            (one,), (other,) = (
                [load_file(file) for file in Path(f"{folder}/{n}/{kind}").glob("*.safetensors")]
                for n in ("one", number)
            )
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        configs = [Path(f"{folder}/{n}/adapters/adapter_config.json") for n in ("one", number)]
        assert configs[0].read_text() == configs[1].read_text()


def load_of_rank(folder):
    """Write adapters, then read a copy on each rank, of which rank 1's differs, and a hostile one."""
    monkeypatch = pytest.MonkeyPatch()
    with build_engine("llama3", [*FLAGS, SHALLOW, *FSDP_2.overrides()], folder) as engine:
        own = Path(f"{folder}/{torch.distributed.get_rank()}")
        engine.save_peft(f"{folder}/both")
        tensors = load_file(f"{folder}/both/adapter_model.safetensors")
        next(iter(tensors.values()))[0, 0] += torch.distributed.get_rank()
        shutil.copytree(f"{folder}/both", own)
        save_file(tensors, own / "adapter_model.safetensors")
        before = [whole(p).clone() for p in engine.model_parts[0].parameters()]
        with pytest.raises(ValueError, match=r"differ between rank 0 and ranks \[1\]"):
            engine.load_peft(own)
        if torch.distributed.get_rank() == 0:
            config = json.loads(Path(f"{folder}/both/adapter_config.json").read_text())
            config["rank_pattern"] = {"(([a-z_.0-9]+)+)+!": 4}  # takes years
            Path(f"{folder}/both/adapter_config.json").write_text(json.dumps(config))
        torch.distributed.barrier()
        with monkeypatch.context() as patched:
            patched.setattr(bounded, "SECONDS", 0.5)
            with pytest.raises(ValueError, match="adapter_config.json has rank_pattern = .*0.5 s"):
                engine.load_peft(f"{folder}/both")
        after = map(whole, engine.model_parts[0].parameters())
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_files_that_differ_or_never_end_are_refused_on_all_ranks_and_change_nothing(tmp_path):
    run_ranks(load_of_rank, 2, str(tmp_path))


@pytest.mark.parametrize(
    "flags",
    [["--lora.rank=2"], ["--lora.target_modules=wq"], ["--lora.also_train=norms"], None],
)
def test_checkpoint_of_other_adapters_is_told_by_their_keys(flags, tmp_path):
    train(ONE_PROCESS, str(tmp_path), 0, 1)
    flags = [*FLAGS, SHALLOW, *flags] if flags else [*FLAGS[2:], SHALLOW]
    with build_engine("llama3", flags, str(tmp_path)) as engine:
        with pytest.raises(ValueError, match=r"does not fit .*Set model.converters and \[lora\]"):
            engine.load()


def test_continued_run_reads_its_base_again_and_refuses_another(tmp_path, caplog):
    for name, seed in (("base", 1), ("other", 2)):
        with build_engine("llama3", [SHALLOW, f"--debug.seed={seed}"], str(tmp_path)) as engine:
            engine.save_hf(tmp_path / name)
    base = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={tmp_path}/base"]
    with build_engine("llama3", [*FLAGS, SHALLOW, *base], str(tmp_path)) as engine:
        assert engine.load()
        engine.load_state_dict({"step": 0, "ntokens_seen": 0, "weights_version": 0})
        run_step(engine, ONE_PROCESS, 0)
        engine.optim_step()
        engine.save()
        engine.save_peft(tmp_path / "adapters")
    losses = train(ONE_PROCESS, str(tmp_path), 1, 2, *base, "--debug.seed=9")[0]
    assert losses != train(ONE_PROCESS, str(tmp_path / "drawn"), 0, 2)[0][1:]
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert "are ignored" not in caplog.text
    base[1] = f"--checkpoint.initial_load_path={tmp_path}/other"
    with pytest.raises(ValueError, match="trained on another base model, .*/base .*, got .*/other"):
        train(ONE_PROCESS, str(tmp_path), 2, 3, *base)


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def run_job(folder, last, *flags):
    """A job of the trainer, with a checkpoint at every second step, of which the newest two stay."""
    checkpoints = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2"]
    checkpoints += ["--checkpoint.no_last_save_model_only"]
    steps = (f"--training.steps={last}", f"--job.dump_folder={folder}")
    config = ConfigManager().parse_args([*TINY_JOB, *checkpoints, *steps, *flags])
    with Trainer(config) as trainer:
        trainer.train()


def test_base_of_adapters_is_not_removed_with_old_steps(tmp_path, own_flavors):
    """Neither by the run of the adapters nor by a later one of the base's folder."""
    lora = ("--model.converters=lora", "--lora.rank=4")
    not_loaded = ("--checkpoint.exclude_from_loading", "optimizer,lr_scheduler")
    run_job(tmp_path, 6)
    run_job(tmp_path, 10, *lora, *not_loaded)
    folder = tmp_path / "checkpoint"
    assert steps_in(folder) == [6, 8, 10]
    base = f"--checkpoint.initial_load_path={folder}/step-6"
    run_job(tmp_path, 12, *lora, base)
    assert steps_in(folder) == [6, 10, 12]

    shutil.copytree(folder / "step-6", folder / "step-5")
    (folder / "step-5/.keep").unlink()
    with pytest.raises(ValueError, match="would replace .*step-6, the base model of adapters"):
        run_job(tmp_path, 8, "--checkpoint.load_step=5")
    shutil.rmtree(folder / "step-6")
    with pytest.raises(ValueError, match="step-6, which does not exist any more"):
        run_job(tmp_path, 14, *lora)
