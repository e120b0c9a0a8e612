"""The family of facts of docs/extending.md has transformers' loss and trains; the families of docs/models.md."""

import importlib.resources
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from tests.reference.model_table import model_table
from torchtitan import models
from torchtitan.config import ConfigManager
from torchtitan.models.hf_config import from_hf_config
from torchtitan.trainer import Trainer

transformers = pytest.importorskip("transformers")
DOCS = Path(__file__).parents[2] / "docs"
WALK = (
    (DOCS / "extending.md").read_text().partition("## A family of facts")[2].partition("\n## ")[0]
)


def block(kind):
    (text,) = re.findall(rf"```{kind}\n(.*?)```", WALK, flags=re.DOTALL)
    return text


class Watched(Trainer):
    """A trainer that keeps what its model gets and gives."""

    def forward_backward_step(self, **batch):
        loss = super().forward_backward_step(**batch)
        self.seen = batch["input_dict"]["input"], batch["labels"], loss
        return loss


def test_family_of_the_page_trains_from_its_folder_with_the_loss_of_transformers(
    tmp_path, monkeypatch
):
    assert len(WALK.splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = transformers.AutoConfig.for_model(**json.loads(block("json")))
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained("granite")
    tokenizer = importlib.resources.files("torchtitan") / "assets/tokenizer"
    shutil.copytree(str(tokenizer), "granite", dirs_exist_ok=True)
    (tmp_path / "my_granite.py").write_text(block("python"))

    flags = block("bash").replace("\\\n", "").split()[3:]
    flags += ["--training.mixed_precision_param=float32", f"--job.dump_folder={tmp_path}"]
    with mock.patch.dict(models.module_paths):  # other tests must not see the family
        trainer = Watched(ConfigManager().parse_args(flags))
        trainer.train()
        tokens, labels, loss = trainer.seen
        trainer.close()
        assert from_hf_config("granite").family == "my_granite"
    del sys.modules["my_granite"]
    with torch.no_grad():
        logits = reference(tokens, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.step == 1 and expected < 20


def test_table_of_families_is_that_of_the_registry_and_the_tests():
    table = model_table()
    assert table in (DOCS / "models.md").read_text()
    assert "| 0 |" not in table, "a family without a config that is compared"
