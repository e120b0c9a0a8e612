"""Weights of a generator's own copy: complete, of the right version, bit for bit."""

import copy
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.distributed.layout_matrix import register_tiny
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.rl.generator import CopyGenerator
from torchtitan.rl.types import SamplingConfig
from torchtitan.rl.weight_sync import (
    NoWeightsError,
    OurNames,
    StaleWeightsError,
    WeightMismatchError,
    copy_weights,
    push_weights,
)

SAMPLING = SamplingConfig(max_tokens=4, seed=1)


def tiny(family: str, seed: int, **changes):
    spec = get_train_spec(register_tiny(family))
    args = copy.deepcopy(spec.model_args["tiny"])
    for name, value in changes.items():
        setattr(args, name, value)
    torch.manual_seed(seed)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_()
    return model


def weights_of(model, version: int = 3, dtype: torch.dtype | None = None) -> WeightStream:
    device = torch.device("cpu")
    return WeightStream([model], OurNames(), device, dtype=dtype, current_version=lambda: version)


@pytest.mark.parametrize("family", ["llama3", "llama4", "deepseek_v3"])
def test_copy_draws_what_the_model_draws_after_an_update_and_nothing_before(family):
    sent, generator = tiny(family, 1), CopyGenerator(tiny(family, 2))
    with pytest.raises(NoWeightsError, match="has no weights"):
        generator.generate([[1, 2, 3]], SAMPLING)
    generator.update_weights(weights_of(sent))
    state = sent.state_dict()
    for name, tensor in generator.model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    found = generator.generate([[1, 2, 3]], SAMPLING, 3)
    direct = CopyGenerator(sent)
    direct.policy_version = 3
    assert found == direct.generate([[1, 2, 3]], SAMPLING, 3)
    assert found[0].policy_version == 3


def test_tied_weights_may_come_once():
    sent, received = (tiny("qwen3", seed, enable_weight_tying=True) for seed in (1, 2))
    for model in (sent, received):
        model.output.weight = model.tok_embeddings.weight
    copy_weights(weights_of(sent), received)
    assert torch.equal(received.output.weight, sent.tok_embeddings.weight)


class Altered:
    """Weights that were damaged on the way."""

    version = 5

    def __init__(self, model, change):
        self._stream, self._change = weights_of(model), change

    @property
    def digest(self):
        return self._stream.digest

    def __iter__(self):
        return filter(None, itertools.starmap(self._change, self._stream))


def flip_one_bit(name, tensor):
    if name == "norm.weight":
        tensor = tensor.clone()
        tensor.view(torch.int32)[0] ^= 1
    return name, tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_one_bit, "have the digest .* sent weights of version 5"),
        (
            lambda name, x: (name, x) if name != "norm.weight" else None,
            "version 5 came without norm.weight",
        ),
        (
            lambda name, x: (name, x[:1]),
            r"tok_embeddings.weight was sent as torch.float32 of \[1, 64\]",
        ),
        (lambda name, x: (name + "_", x), "the generator's model has nothing of this name"),
        (lambda name, x: (name, x.bfloat16()), "was sent as torch.bfloat16 .*; give both the same"),
    ],
)
def test_other_weights_than_those_sent_are_refused_and_not_sampled_from(change, message):
    generator = CopyGenerator(tiny("llama3", 2))
    with pytest.raises(WeightMismatchError, match=message):
        generator.update_weights(Altered(tiny("llama3", 1), change))
    with pytest.raises(NoWeightsError, match="only a part of an update"):
        generator.generate([[1, 2, 3]], SAMPLING)


@pytest.mark.parametrize("version", [2, 4])
def test_generator_that_has_other_weights_after_an_update_is_told(version):
    generator = SimpleNamespace(
        weight_dtype=None, weight_names="none", policy_version=version, update_weights=mock.Mock()
    )
    with pytest.raises(
        StaleWeightsError, match=f"has version {version} after an update to version 3"
    ):
        push_weights(SimpleNamespace(weights_version=3), generator)
