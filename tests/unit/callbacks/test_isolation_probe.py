"""The run-time probe has no effect on a correct model, and names the place of a leak."""

import pytest
import torch
from torch import nn

from tests.unit.batch.document_runs import make_trainer, short_documents
from torchtitan.batch.mask import DocumentMask
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.callbacks.isolation_probe import IsolationProbe

pytestmark = [pytest.mark.usefixtures("narrow_debugmodel"), pytest.mark.long]
PROBE = "--debug.check_document_isolation_freq=1"
STEPS = "--training.steps=4"


def ignore_mask(trainer, layer: str) -> None:
    """Make the attention of a layer see whole rows."""
    attention = trainer.model_parts[0].layers[layer].attention
    forward = attention.forward

    def seeing_the_row(x, rope, attention_masks=None):
        return forward(x, rope, DocumentMask.from_rows(*x.shape[:2], x.device))

    attention.forward = seeing_the_row


def losses_and_random_state(folder, attn_type, *overrides):
    data = short_documents(folder)
    trainer = make_trainer(folder, attn_type, *data, STEPS, *overrides)
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
    trainer.train()
    trainer.close()
    return losses, torch.get_rng_state()


def test_probe_changes_no_number_and_no_random_state(tmp_path):
    without = losses_and_random_state(tmp_path, "flex")
    probed = losses_and_random_state(tmp_path, "flex", PROBE)
    assert len(without[0]) == 4
    assert probed[0] == without[0]
    assert torch.equal(probed[1], without[1])


PER_OPERATOR = "mode=selective --activation_checkpoint.selective_ac_option=op"


@pytest.mark.parametrize(
    ("attn_type", "recomputing"),
    [
        ("flex", "mode=full"),
        ("varlen", f"{PER_OPERATOR} --training.mixed_precision_param=bfloat16"),
    ],
)
def test_sound_model_passes_with_checkpointed_activations(tmp_path, attn_type, recomputing):
    overrides = f"--activation_checkpoint.{recomputing}".split()
    losses, _ = losses_and_random_state(tmp_path, attn_type, PROBE, *overrides)
    assert len(losses) == 4


@pytest.mark.parametrize(("attn_type", "layer"), [("flex", "0"), ("varlen", "5")])
def test_layer_that_ignores_the_mask_stops_the_run_and_is_named(tmp_path, attn_type, layer):
    trainer = make_trainer(tmp_path, attn_type, *short_documents(tmp_path), STEPS, PROBE)
    ignore_mask(trainer, layer)
    with pytest.raises(RuntimeError, match=rf"layers\.{layer} is the first layer") as error:
        trainer.train()
    assert trainer.step == 1
    message = str(error.value)
    assert "documents are not isolated at step 1" in message
    assert message.count("row ") == 2 and message.count("(document ") == 2
    assert f"attn_type '{attn_type}'" in message and "rounding" not in message


def test_plain_causal_attention_is_checked_for_causality_and_says_so_once(tmp_path, caplog):
    causal = ["--model.attn_mask_type=causal", PROBE]
    with caplog.at_level("INFO"):
        losses, _ = losses_and_random_state(tmp_path, "sdpa", *causal)
    assert len(losses) == 4
    assert caplog.text.count("the isolation probe checks only that") == 1

    trainer = make_trainer(tmp_path, "sdpa", *short_documents(tmp_path), STEPS, *causal)
    kernel = trainer.model_parts[0].layers["2"].attention.inner_attention
    forward = kernel.forward
    kernel.forward = lambda *args, **kwargs: forward(*args, **kwargs, is_causal=False)
    with pytest.raises(RuntimeError, match=r"layers\.2 is the first layer"):
        trainer.train()


def test_leak_behind_the_layers_is_told_from_one_in_them(tmp_path):
    trainer = make_trainer(tmp_path, "flex", *short_documents(tmp_path), STEPS, PROBE)
    trainer.model_parts[0].norm.forward = lambda x: x / x.square().mean().sqrt()
    with pytest.raises(RuntimeError, match="no layer's output changed, so the leak is after"):
        trainer.train()


def test_probe_is_off_by_default_and_runs_at_the_first_step_and_every_n_after_it(tmp_path):
    data = short_documents(tmp_path)
    assert make_trainer(tmp_path, "flex", *data).isolation_probe is None

    every_3 = "--debug.check_document_isolation_freq=3"
    trainer = make_trainer(tmp_path, "flex", *data, "--training.steps=8", every_3)
    steps = []
    trainer.isolation_probe.check = lambda step, batch: steps.append(step)
    trainer.train()
    trainer.close()
    assert steps == [1, 4, 7]


# ---- the probe by itself ----


class Mixing(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.layers = nn.ModuleDict({"0": layer})

    def forward(self, tokens):
        return self.layers["0"](self.embedding(tokens))


def probe_of(layer):
    model = Mixing(layer)
    packing = DocumentPolicy("flex", "position_block_causal", 0, True, True)
    forward = torch.no_grad()(lambda batch: model(batch.tokens))
    return IsolationProbe(forward, [model], packing, 16, seed=1, device=torch.device("cpu"))


def check(probe, batch):
    for step in range(20):
        probe.check(step, batch)


BATCH = {
    "input": torch.randint(1, 16, (2, 6), generator=torch.Generator().manual_seed(0)),
    "positions": torch.tensor([[0, 1, 2, 0, 1, -1], [4, 5, 0, -1, -1, -1]]),
}


def test_exchanged_token_differs_between_steps_and_is_never_padding_or_end_of_text():
    probe = probe_of(nn.Identity())
    tokens = BATCH["input"].clone()
    tokens[0, 2] = 0
    seen = []
    original = probe._exchange
    probe._exchange = lambda batch, place: seen.append(place) or original(batch, place)
    for step in range(40):
        probe.check(step, BATCH | {"input": tokens})
    # Documents followed by another document or by padding in their row.
    assert set(seen) == {(0, 0), (0, 1), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)}


class Leaky(nn.Module):
    """A layer with a leak; it may differ at every second call."""

    def __init__(self, leak):
        super().__init__()
        self.leak, self.calls = leak, 0

    def forward(self, x):
        self.calls += 1
        return self.leak(x, self.calls % 2 == 0)


@pytest.mark.parametrize(
    "leak",
    [
        pytest.param(lambda x, _: x + x.roll(1, dims=1), id="later tokens"),
        pytest.param(lambda x, _: x + x.roll(-1, dims=1), id="earlier tokens"),
        pytest.param(lambda x, _: x + x.flip(0), id="another row"),
        pytest.param(lambda x, is_second: x * torch.nan if is_second else x, id="nan in one"),
    ],
)
def test_leaks_of_every_kind_are_found_with_their_place(leak):
    probe = probe_of(Leaky(leak))
    place = r"row \d, token \d \(document \d, its token \d\).*layers\.0"
    with pytest.raises(RuntimeError, match=place):
        check(probe, BATCH)


def test_model_with_experts_passes_until_a_layer_ignores_the_mask(tmp_path):
    flags = ["--model.name=qwen3", "--model.flavor=debugmodel_moe_small", STEPS, PROBE]
    trainer = make_trainer(tmp_path, "varlen", *short_documents(tmp_path), *flags)
    batch = next(iter(trainer.dataloader))[0]
    trainer.isolation_probe.check(1, batch)
    ignore_mask(trainer, "1")
    with pytest.raises(
        RuntimeError, match=r"layers\.1 is the first layer.*rounding may be the only cause"
    ):
        trainer.isolation_probe.check(1, batch)
    trainer.close()


TREES = {
    "input": torch.randint(1, 16, (1, 9), generator=torch.Generator().manual_seed(0)),
    "document_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 3, -1]]),
    "parent_ids": torch.tensor([[-1, -1, -1, 0, 0, 0, 0, 2, -1]]),
}
ALONE = {key: x for key, x in TREES.items() if key != "parent_ids"}


def attend_by_trees(batch):
    """A layer that adds up what each token of the batch sees."""
    policy = DocumentPolicy("flex", "position_block_causal", 0, True, True)
    of_batch = policy.token_batch(batch)
    mask = DocumentMask.from_documents(of_batch.document_ids, depths=of_batch.depths)
    seen = mask.lower("sdpa").lowered[:, 0].float()
    return Leaky(lambda x, _: seen @ x)


def test_probe_passes_trees_whose_tokens_see_their_branch():
    check(probe_of(attend_by_trees(TREES)), TREES)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        pytest.param(ALONE, "a branch does not see its ancestors", id="no ancestors"),
        pytest.param(
            ALONE | {"document_ids": torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, -1]])},
            r"must not see it changed.*document [23]",
            id="siblings",
        ),
    ],
)
def test_probe_finds_branches_that_miss_ancestors_or_see_siblings(seen, message):
    probe = probe_of(attend_by_trees(seen))
    with pytest.raises(RuntimeError, match=message):
        check(probe, TREES)


def test_model_whose_attention_adds_nothing_yet_is_no_branch_without_ancestors():
    check(probe_of(nn.Identity()), TREES)  # as with an output projection that starts at 0


def test_batch_with_masks_of_its_own_is_not_checked_and_that_is_said(caplog):
    probe_of(Leaky(lambda x, _: x + x.roll(1, dims=1))).check(0, BATCH | {"attention_masks": None})
    assert "the batch has its own masks" in caplog.text


def test_dropout_is_the_same_for_both_forwards():
    probe = probe_of(nn.Dropout(0.5))
    state = torch.get_rng_state()
    probe.check(0, BATCH)
    assert torch.equal(torch.get_rng_state(), state)
