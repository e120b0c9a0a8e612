"""DPO in the trainer: the same on every layout, with every kind of reference, and after a resume."""

import json
import math
import re
import shutil
from typing import Any

import pytest
import torch

from tests.distillation_jobs import other_tokenizer, train_job_of_page
from tests.tiny_hf import tiny_hf_model
from tests.unit.data.chats import SHORT, write_tokenizer
from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.data.chats import ChatEncoder
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.testing.gloo import run_ranks
from torchtitan.trainer import Trainer

STEPS, PAIRS, HELD_OUT = 4, 40, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, training pairs and held-out pairs with the model's log-probs by transformers."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("preference")
    tokenizer = HuggingFaceTokenizer(str(write_tokenizer(folder / "model", SHORT)))
    model = tiny_hf_model("llama3", vocab_size=260)
    model.save_pretrained(folder / "model")
    encode = ChatEncoder.of_tokenizer(tokenizer)

    @torch.no_grad()
    def logprob(prompt, answer):
        ids, is_answer = encode({"prompt": prompt, "completion": answer})
        ids, places = torch.tensor(ids)[None].long(), torch.tensor(is_answer).nonzero().flatten()
        logprobs = model(input_ids=ids).logits[0].double().log_softmax(-1)
        return sum(float(logprobs[i - 1, ids[0, i]]) for i in places.tolist())

    for name, numbers in (("train", range(PAIRS)), ("held_out", range(100, 100 + HELD_OUT))):
        with open(folder / f"{name}.jsonl", "w") as file:
            for n in numbers:
                answers = [f"{2 * n}", f"not {n % 5 * 'so '}{n}"]
                chosen, rejected = answers if n % 3 else answers[::-1]
                pair = {"prompt": f"{n}+{n}=", "chosen": chosen, "rejected": rejected}
                for key in ("chosen", "rejected"):
                    pair[f"ref_{key}_logps"] = logprob(pair["prompt"], pair[key])
                file.write(json.dumps(pair) + "\n")
    return folder


def train(folder: str, output: str, ranks: dict[str, int], *flags: str) -> dict[str, Any]:
    """Return the metrics of this rank's training steps and validations."""
    fixed = f"""
        job.dump_folder={output} model.name=llama3 model.hf_assets_path={folder}/model
        activation_checkpoint.mode=none loss.name=dpo
        training.dataset=preference training.dataset_path={folder}/train.jsonl training.packing=fit
        training.seq_len=128 training.mixed_precision_param=float32 training.global_batch_size=4
        training.local_batch_size=4 training.steps={STEPS} metrics.log_freq=1 optimizer.lr=3e-4
        optimizer.eps=1e-4 lr_scheduler.warmup_steps=0 debug.seed=3 training.shuffle
        validation.enable validation.freq=2 validation.dataset_path={folder}/held_out.jsonl
        validation.dataset=preference validation.local_batch_size=1
    """.split()
    if not any("flavor" in flag for flag in flags):
        fixed += f"""
            model.hf_config={folder}/model checkpoint.initial_load_in_hf model.attn_type=varlen
            model.attn_mask_type=block_causal
        """.split()
    fixed += [f"parallelism.{name}_degree={n}" for name, n in ranks.items()]
    config = ConfigManager().parse_args([f"--{flag}" for flag in (*fixed, *flags)])
    steps, validations, names = [], [], ("accuracy", "margin")
    with Trainer(config) as trainer:

        def log(step, loss, max_loss, grad_norm, extra_metrics):
            extra = (extra_metrics[f"loss_metrics/{name}"] for name in names)
            steps.append((loss, *extra, grad_norm))

        def log_validation(loss, step, extra_metrics):
            extra = (extra_metrics[f"validation_metrics/{name}"] for name in names)
            validations.append((loss, *extra))

        trainer.metrics_processor.log = log
        trainer.metrics_processor.log_validation = log_validation
        trainer.train()
    return {"steps": steps, "validations": validations}


def run(folder, output, ranks: dict[str, int], *flags: str) -> dict[str, Any]:
    options = {"timeout_seconds": 600, "init_process_group": False}
    arguments = str(folder), str(output), ranks, *flags
    return run_ranks(train, math.prod(ranks.values()), *arguments, **options)[0]


@pytest.fixture(scope="module")
def one_process(folder, tmp_path_factory):
    return run(folder, tmp_path_factory.mktemp("one"), {})


def difference(ours, theirs) -> float:
    """Return the largest difference of numbers up to about 1."""
    return (torch.tensor(ours) - torch.tensor(theirs)).abs().max().item()


LORA = ("model.converters=lora", "optimizer.lr=1e-2")
LAYOUTS: dict[str, tuple] = {
    "FSDP 2, accumulation 2": ({"data_parallel_shard": 2}, "training.local_batch_size=1"),
    "TP 2": ({"tensor_parallel": 2},),
    "PP 2": ({"pipeline_parallel": 2}, "parallelism.pipeline_parallel_schedule=1F1B"),
    "CP 2": ({"context_parallel": 2},),
    "FSDP 2, LoRA": ({"data_parallel_shard": 2}, "training.local_batch_size=2", *LORA),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_and_validates_like_one_process(layout, folder, one_process, tmp_path):
    ranks, *flags = LAYOUTS[layout]
    got = run(folder, tmp_path, ranks, *flags)
    expected = run(folder, tmp_path / "one", {}, *LORA) if "LoRA" in layout else one_process
    assert len(got["validations"]) == 3  # after steps 1, 2 and 4
    assert difference(got["steps"], expected["steps"]) <= 1e-5
    assert difference(got["validations"], expected["validations"]) <= 1e-5


def test_config_of_the_page_trains_a_model_that_transformers_opens(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    changes = {"/models/sft": f"{folder}/model", "/data/pairs": f"{folder}/train"}
    changes |= {"./outputs/dpo": tmp_path}
    saved, tokens, logits = train_job_of_page("dpo", changes, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert (model(tokens).logits - logits).abs().max() <= 0.05  # of 4, in bf16


@pytest.mark.parametrize("adapters", [(), LORA], ids=["all weights", "LoRA"])
def test_every_reference_with_the_initial_weights_is_one(adapters, folder, tmp_path):
    references = ["initial", "precomputed", f"{folder}/model", *["adapters_off"] * bool(adapters)]
    runs = [
        train(str(folder), str(tmp_path / str(n)), {}, f"loss.reference={reference}", *adapters)
        for n, reference in enumerate(references)
    ]
    for own in runs[1:]:
        assert own["steps"][-1][0] != own["steps"][0][0]
        # In the first step the sign of the margins, 0, is rounding.
        first, (loss, _, margin, norm) = own["steps"][0], runs[0]["steps"][0]
        assert difference([(first[0], *first[2:])], [(loss, margin, norm)]) <= 1e-5
        assert difference(own["steps"][1:], runs[0]["steps"][1:]) <= 1e-5
        assert difference(own["validations"], runs[0]["validations"]) <= 1e-5


def test_reference_folder_scores_with_the_mask_that_the_policys_flavor_chose(folder, tmp_path):
    flags = "model.flavor=debugmodel_varlen_attn training.steps=1 validation.no_enable".split()
    saved = ["checkpoint.enable", "checkpoint.last_save_in_hf"]
    train(str(folder), str(tmp_path), {}, *flags, *saved, "optimizer.lr=1e-45")
    (reference,) = tmp_path.glob("checkpoint/step-*")
    assert (reference / "config.json").exists()
    got = train(str(folder), str(tmp_path / "2"), {}, *flags, f"loss.reference={reference}")
    ((loss, _, margin, _),) = got["steps"]
    assert difference([loss, margin], [math.log(2), 0]) <= 1e-6


def test_reference_that_cannot_score_is_refused_before_a_build(folder, tmp_path, monkeypatch):
    shutil.copytree(folder / "model", tmp_path / "teacher")
    monkeypatch.setattr("torchtitan.build.build", None)
    no_weights = "must be a Hugging Face folder with safetensors files, or a step folder of a run"
    for name, message in {"teacher": other_tokenizer(tmp_path), ".": no_weights}.items():
        reference = f"loss.reference={tmp_path}/{name}"
        with pytest.raises(ConfigError, match=f"loss.reference.*{re.escape(message)}"):
            train(str(folder), str(tmp_path / "out"), {}, reference)


def test_resumed_run_has_the_bits_of_an_uninterrupted_one(folder, tmp_path):
    flags = ["checkpoint.enable", "checkpoint.interval=2"]
    whole = train(str(folder), str(tmp_path), {}, *flags)
    resumed = train(str(folder), str(tmp_path), {}, *flags, "checkpoint.load_step=2")
    assert resumed["steps"] == whole["steps"][2:]
    assert resumed["validations"] == whole["validations"][2:]
