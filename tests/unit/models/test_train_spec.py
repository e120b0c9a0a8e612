"""Looking train specs up by name, and what a client may change in them."""

import dataclasses
from functools import wraps

import pytest
import torch

from torchtitan.config import ConfigManager
from torchtitan.data.text_datasets import build_text_dataloader
from torchtitan.data.tokenizer import build_hf_tokenizer
from torchtitan.job import resolve_job
from torchtitan.loss.cross_entropy import build_cross_entropy_loss
from torchtitan.models.llama3 import llama3_args, parallelize_llama
from torchtitan.optim.lr_scheduler import build_lr_schedulers
from torchtitan.optim.optimizer import build_optimizers
from torchtitan.protocols import BaseModelArgs, ModelProtocol
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
from torchtitan.tools.errors import ConfigError

SPEC = TrainSpec(
    model_cls=ModelProtocol,
    model_args={"tiny": BaseModelArgs()},
    parallelize_fn=parallelize_llama,
    pipelining_fn=None,
    build_optimizers_fn=build_optimizers,
    build_lr_schedulers_fn=build_lr_schedulers,
    build_dataloader_fn=build_text_dataloader,
    build_tokenizer_fn=build_hf_tokenizer,
    build_loss_fn=build_cross_entropy_loss,
)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(train_spec_module, "_extra_train_specs", {})


def test_registered_spec_is_found_by_its_name_which_can_be_registered_once():
    register_train_spec("fake", SPEC)
    assert get_train_spec("fake") == SPEC
    with pytest.raises(ValueError, match="'fake' is already registered"):
        register_train_spec("fake", SPEC)
    with pytest.raises(ValueError, match="'lama3'.*did you mean 'llama3'.*fake.*llama3.*qwen3"):
        get_train_spec("lama3")


def test_specs_of_a_built_in_model_share_their_flavor_args():
    first, second = get_train_spec("llama3"), get_train_spec("llama3")
    assert first is not second
    assert first.model_args["debugmodel"] is second.model_args["debugmodel"]
    assert first.model_args is llama3_args


def test_protocol_methods_that_were_not_defined_say_so():
    model = ModelProtocol(BaseModelArgs())
    with pytest.raises(NotImplementedError, match="ModelProtocol.*sdpa"):
        model.get_attention_masks(torch.ones(1, 1), None)
    with pytest.raises(NotImplementedError, match="init_weights"):
        model.init_weights()


def test_dataset_is_checked_where_the_builder_itself_says_which_it_knows():
    config = ConfigManager().parse_args(["--training.dataset=own"])
    spec = get_train_spec("llama3")

    @wraps(build_text_dataloader)
    def wrapper(**arguments):
        """It may know datasets of its own."""

    class Loader:
        @property
        def registered_datasets(self):
            """For instances."""

    for builder in (wrapper, Loader):
        resolve_job(config, train_spec=dataclasses.replace(spec, build_dataloader_fn=builder))
    with pytest.raises(ConfigError, match="registered dataset .* got 'own'"):
        resolve_job(config, train_spec=spec)


def test_fact_of_a_builder_follows_the_builder_unless_the_spec_says_it():
    spec = get_train_spec("llama3")
    assert spec.fact("has_token_loss") and spec.fact("cuts_by_layers")
    own = dataclasses.replace(spec, build_loss_fn=lambda config, **_: None)
    assert own.fact("has_token_loss") is None
    own.has_token_loss = True
    assert own.fact("has_token_loss")
    assert dataclasses.replace(spec, optimizer_names=("Muon",)).fact("optimizer_names") == ("Muon",)
