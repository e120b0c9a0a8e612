"""What the documentation names is there, and its examples run; test_docs_site.py checks its links."""

import dataclasses
import importlib
import json
import operator
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import safetensors.torch
import tomli
import torch

from scripts import architecture, changelog
from tests.unit.callbacks.test_metrics import processor
from tests.unit.models.test_hf_config import LLAMA_3_2_3B
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Checkpoint
from torchtitan.config.toml_values import with_values
from torchtitan.data.text_datasets import DATASETS
from torchtitan.engine import TrainingEngine
from torchtitan.job import find_train_spec
from torchtitan.protocols import train_spec
from torchtitan.rl.job_config import JobConfig as RLJobConfig
from torchtitan.rl.losses import DROLoss, GSPOLoss
from torchtitan.tools.logging import logger

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
ROOT_PAGES = ("CHANGELOG", "CONTRIBUTING", "README")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*sorted(DOCS.glob("*.md")), *(ROOT / f"{name}.md" for name in ROOT_PAGES)]
}

FILES = (".py", ".jsonl", ".safetensors.index.json")  # look like keys


def missing_files(text: str) -> list[str]:
    folders = "torchtitan|tests|scripts|benchmarks|examples|docs|\\.ci"
    named = re.findall(rf"(?<![\w/.])(?:\./)?((?:{folders})/[\w./-]+)", text)
    return [path for path in named if "NAME" not in path and not (ROOT / path.rstrip(".")).exists()]


def missing_keys(text: str) -> list[str]:
    config, missing = RLJobConfig(), []
    sections = "|".join(field.name for field in dataclasses.fields(config))
    for key in re.findall(rf"(?:`|--)((?:{sections})(?:\.[a-z]\w*)+)[`\s=]", text):
        try:
            key.endswith(FILES) or operator.attrgetter(key)(config)
        except AttributeError:
            missing.append(key)
    return missing


def missing_modules(text: str) -> list[str]:
    missing = []
    for path in sorted(set(re.findall(r"(?<![\w./-])torchtitan(?:\.[A-Za-z_]\w*)+", text))):
        try:
            value = pkgutil.resolve_name(path)
            if isinstance(value, ModuleType):  # an attribute would be no path of a module
                importlib.import_module(path)
        except (ImportError, AttributeError) as error:
            package = (getattr(error, "name", None) or "torchtitan").partition(".")[0]
            missing += [path] if package == "torchtitan" else []  # others may not be installed
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_files_keys_of_the_config_modules_and_names_that_a_page_names_are_there(page):
    for missing in (missing_files, missing_keys, missing_modules):
        assert missing(PAGES[page]) == []


# ---- architecture.md ----


def test_every_part_of_the_package_is_described():
    page = PAGES["docs/architecture.md"]
    parts = [part for row in architecture.LAYERS for part in row]
    assert [part for part in parts if f"**`{part}`**" not in page] == []


# ---- metrics.md ----


def test_every_metric_of_training_is_described(tmp_path):
    made = processor(tmp_path, peak=1.0)
    made.log(1, 1.0, 1.0, 1.0, extra_metrics={"n_tokens_seen": 1, "lr": 1.0})
    made.log_validation(1.0, 1)
    names = {name for _, metrics in made.logger.records for name in metrics}
    rest = {name for name in names if f"`{name}`" not in PAGES["docs/metrics.md"]}
    assert {name for name in rest if "validation_metrics/memory/" not in name} == set()


def test_every_metric_of_rl_is_described():
    source = (ROOT / "torchtitan/rl/controller.py").read_text()
    names = set(re.findall(r'"((?:rl|time)/[\w()]+)"', source))
    options = {"correction": "sequence", "max_token_mismatch": 1.0, "max_sequence_mismatch": 1.0}
    for loss in (GSPOLoss(kl_coef=1.0, entropy_coef=1.0, **options), DROLoss()):
        names |= {f"loss/{name}" for name in loss.metric_names}
    assert names and not [name for name in names if f"`{name}`" not in PAGES["docs/metrics.md"]]


# ---- extending.md ----


@pytest.mark.long
def test_module_of_the_page_on_extending_trains(tmp_path):
    page = PAGES["docs/extending.md"].partition("## A module of your own")[2]
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my_ideas.py").write_text("\n\n".join(blocks))
    (command,) = re.findall(r"```bash\npython (.*?)```", page, flags=re.DOTALL)
    result = subprocess.run(
        [sys.executable, *command.replace("\\\n", "").split()]
        + ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"]
        + ["--parrot.z_loss=0.5", f"--job.dump_folder={tmp_path}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    # ln(2048) = 7.6, and half of its square for the loss's own term.
    (loss,) = re.findall(r"step:  2 .*?loss: +([\d.]+)", result.stdout)
    assert 30 < float(loss) < 45


# ---- Python in the pages ----

NOT_RUN = "# Not run by the tests: "  # and why
# Blocks of one page continue each other. Elsewhere run those on extending (above, and in
# tests/reference/test_extending.py), and of the quickstart (tests/reliability/test_quickstart.py).
PYTHON_PAGES = {page for page in PAGES if "```py" in PAGES[page]}
PYTHON_PAGES = sorted(PYTHON_PAGES - {"docs/extending.md", "docs/quickstart.md"})


def names_of_checkpoint_page():
    """An engine, the folders that the page reads, and a place to send weights to."""
    for folder in ("assets/hf/Llama-3.2-3B", "hf_folder"):
        Path(folder).mkdir(parents=True)
    Path("assets/hf/Llama-3.2-3B/config.json").write_text(json.dumps(LLAMA_3_2_3B))
    llama3 = train_spec.get_train_spec("llama3")
    flavors = {"debugmodel": dataclasses.replace(llama3.model_args["debugmodel"], dim=32)}
    engine = TrainingEngine(
        JobConfig(checkpoint=Checkpoint(enable=True)),
        train_spec=dataclasses.replace(llama3, model_args=flavors),
    )
    engine.save_hf("hf_folder")
    sent: dict = {}
    senders = {"send": sent.__setitem__, "send_last": lambda version, digest: None}
    return {"engine": engine, "sent": sent, **senders}


def batches_of_embedding_page():
    """Two microbatches of 8 and 6 labels, and the mean over their tokens as a loss of one's own."""
    batches = []
    for n_tokens in (8, 6):
        batch = {"input": torch.arange(n_tokens)[None], "labels": torch.arange(n_tokens)[None] + 1}
        ones = torch.ones(1, n_tokens)
        batches.append(
            batch | {"old_logprobs": -7 * ones, "advantages": ones, "weights": ones / 14}
        )

    def my_loss(logits, labels, batch):
        return torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")

    given = dict.fromkeys(["microbatches", "batches"], batches)
    return given | {"my_loss": my_loss, "num_valid_of_the_step": 14}


GIVEN = {  # what a page takes for granted
    "docs/embedding.md": batches_of_embedding_page,
    "docs/checkpoint.md": names_of_checkpoint_page,
    "docs/report.md": lambda: {"job_config": JobConfig(), "step": 3},
}


def readme_trained(names, output):
    assert "OptimStepResult" in output and names["logits"].shape == (4, 128, 2048)
    assert names["controller"].trainer.policy_version == 2
    assert Path("outputs/rl/copy_cpu/episodes.jsonl").exists()


def weights_were_sent(names, output):
    (table,) = re.findall(r"^```toml\n(.*?)^```$", PAGES["docs/checkpoint.md"], re.M | re.S)
    args = find_train_spec(with_values(JobConfig(), tomli.loads(table))).model_args["debugmodel"]
    assert (args.dim, args.n_layers) == (LLAMA_3_2_3B["hidden_size"], 4)
    (file,) = Path("hf_folder").glob("*.safetensors")
    assert {path.name for path in Path("outputs/checkpoint").iterdir()} >= {"step-0"}
    for name, weight in safetensors.torch.load_file(file).items():
        assert torch.equal(names["sent"].pop(name), weight.bfloat16()), name
    assert not names["sent"]


def labels_are_left_out(names, output):
    ignored = (names["labels"] == -100).nonzero().tolist()
    assert ignored == [[0, 3], [0, 6], [0, 7]] and names["num_valid"] == 5


def metrics_and_the_critics_gradient_are_those_by_hand(names, output):
    assert names["step"].metrics["tokens"] == 14
    # 14 labels of weight 1/14 and ratio exp(log-prob + 7): about minus the largest ratio, or above.
    assert -names["step"].metrics["largest_ratio"] <= names["step"].loss < 0
    (values,) = names["critic"].forward_step({"input": names["tokens"]})
    slope = 2 * (values.squeeze(-1) - names["returns"]) * names["mask"]
    bias = names["critic"].model_parts[0].score.bias.grad
    torch.testing.assert_close(bias, slope.mean()[None])


def dataset_is_registered(names, output):
    assert DATASETS["wiki"].sample_processor({"title": "a", "body": "b"}) == "a\n\nb"


def phase_is_on_record(names, output):
    kinds = [json.loads(line)["kind"] for line in open("outputs/events.jsonl")]
    assert kinds == ["start", "phase", "end"]


def policy_took_a_step(names, output):
    assert names["done"].policy_version == 1 and names["done"].lr == 1e-4
    assert not any(Path().iterdir())  # nothing was asked to be written


def prompt_was_scored(names, output):
    assert [len(row or ()) for row in names["response"].topk_prompt_logprobs] == [0, 3, 3]


def guesses_are_answered(names, output):
    prompt, turn = names["Prompt"]("?", (1,), "5"), names["Turn"]
    replies = [names["Guess"].reply(None, prompt, [turn(guess)]) for guess in "375"]
    assert replies == [">", "<", None]


THEN = {
    "README.md": readme_trained,
    "docs/checkpoint.md": weights_were_sent,
    "docs/datasets.md": dataset_is_registered,
    "docs/documents.md": labels_are_left_out,
    "docs/embedding.md": metrics_and_the_critics_gradient_are_those_by_hand,
    "docs/report.md": phase_is_on_record,
    "docs/rl.md": policy_took_a_step,
    "docs/rl_reference.md": guesses_are_answered,
    "docs/rl_serve.md": prompt_was_scored,
}


@pytest.mark.long
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_blocks_of_a_page_run_one_after_another(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.M | re.S)
    assert len(blocks) == PAGES[page].count("```py")
    level, names = logger.level, GIVEN.get(page, dict)()
    with mock.patch.dict(train_spec._extra_train_specs), mock.patch.dict(DATASETS):
        try:
            for block in blocks:
                block = re.sub(r"--training\.steps=\d+", "--training.steps=2", block)
                code = compile(block.replace("/tmp/", f"{tmp_path}/"), page, "exec")
                if NOT_RUN not in block:
                    exec(code, names)
            if any(NOT_RUN not in block for block in blocks):
                THEN[page](names, capfd.readouterr().out)
        finally:
            logger.setLevel(level)
            for value in names.values():
                if isinstance(value, TrainingEngine):
                    value.close()


# ---- CHANGELOG.md ----


def test_release_moves_the_fragments_above_the_earlier_versions(tmp_path):
    (tmp_path / "changelog.d").mkdir()
    for name, text in {"b": "Second.\n", "a": "First, on\ntwo lines.\n"}.items():
        (tmp_path / f"changelog.d/{name}.md").write_text(text)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nHead.\n\n## 0.2.100\n\n- Old.\n")
    changelog.release("0.2.101", tmp_path)
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nHead.\n\n## 0.2.101\n\n- First, on two lines.\n- Second.\n"
        "\n## 0.2.100\n\n- Old.\n"
    )
    assert not list((tmp_path / "changelog.d").iterdir())


def test_version_is_none_that_the_reference_has_published():
    version = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version.startswith("0.2.100")
