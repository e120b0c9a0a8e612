import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.config import JobConfig
from torchtitan.loss.cross_entropy import (
    IGNORE_INDEX,
    SummedCrossEntropy,
    build_cross_entropy_loss,
    build_mse_loss,
    cross_entropy_loss,
    default_head,
    mse_loss,
)
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

VOCAB = 100


def batch(rows: int, seq_len: int, valid: float = 1.0, seed: int = 0):
    """Logits [rows, seq_len, VOCAB] fp32 and labels [rows, seq_len], the first ones valid."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, seq_len, VOCAB, generator=generator)
    labels = torch.randint(0, VOCAB, (rows, seq_len), generator=generator)
    labels[:, int(seq_len * valid) :] = IGNORE_INDEX
    return logits, labels


def test_cross_entropy_is_the_sum_of_minus_log_probabilities():
    logits, labels = batch(2, 5, valid=0.6)
    expected = 0.0
    for row, row_labels in zip(logits.double(), labels, strict=True):
        for token_logits, label in zip(row, row_labels, strict=True):
            if label != IGNORE_INDEX:
                expected += token_logits.logsumexp(0) - token_logits[label]
    torch.testing.assert_close(cross_entropy_loss(logits, labels).double(), expected)


def test_ignored_tokens_give_neither_loss_nor_gradient():
    logits, labels = batch(2, 8, valid=0.5)
    logits.requires_grad_()
    loss = cross_entropy_loss(logits, labels)
    loss.backward()
    torch.testing.assert_close(loss, cross_entropy_loss(logits[:, :4], labels[:, :4]))
    assert logits.grad[:, 4:].count_nonzero() == 0
    assert cross_entropy_loss(logits[:, 4:], labels[:, 4:]) == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 5), st.integers(0, 100))
def test_loss_is_same_for_any_microbatch_split(rows, seq_len, cut, seed):
    logits, labels = batch(rows, seq_len, seed=seed)
    cut = min(cut, rows)
    parts = [slice(0, cut), slice(cut, rows)]
    split = sum(cross_entropy_loss(logits[p], labels[p]) for p in parts if p.stop > p.start)
    torch.testing.assert_close(split, cross_entropy_loss(logits, labels))


def test_bf16_logits_are_summed_in_fp32():
    logits, labels = batch(2, 8)
    loss = cross_entropy_loss(logits.bfloat16(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy_loss(logits.bfloat16().float(), labels))


def test_mse_is_summed_and_has_no_gradient_for_the_labels():
    pred = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([[0.0, 4.0]], requires_grad=True)
    loss = mse_loss(pred, labels)
    loss.backward()
    assert loss == 5.0 and loss.dtype == torch.float32
    assert labels.grad is None
    assert pred.grad.tolist() == [[2.0, -4.0]]


@pytest.mark.parametrize(
    "enable, components, compiled",
    [(True, ["loss"], True), (True, ["model"], False), (False, ["model", "loss"], False)],
)
def test_loss_is_compiled_only_when_asked(enable, components, compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, backend: ("compiled", fn, backend))
    config = JobConfig()
    config.compile.enable, config.compile.components = enable, components
    expected = ("compiled", cross_entropy_loss, "inductor") if compiled else cross_entropy_loss
    assert build_cross_entropy_loss(config, parallel_dims=None, x=1) == expected
    assert compiled or build_mse_loss(config, ft_manager=None) is mse_loss


def test_compiled_loss_equals_the_eager_one():
    config = JobConfig()
    config.compile.enable, config.compile.backend = True, "aot_eager"
    logits, labels = batch(2, 8, valid=0.5)
    torch.testing.assert_close(
        build_cross_entropy_loss(config)(logits, labels), cross_entropy_loss(logits, labels)
    )


def test_loss_is_computed_in_the_output_projection_where_the_vocabulary_is_large():
    def head(vocab_size=256, chunk=-1, loss_fn=cross_entropy_loss, backend=None, **part):
        with torch.device("meta"):
            model = Transformer(TransformerModelArgs(dim=32, n_layers=1, vocab_size=vocab_size))
        for name, module in part.items():
            setattr(model, name, module)
        config = JobConfig()
        config.training.loss_chunk = chunk
        config.compile.enable, config.compile.backend = backend is not None, backend or ""
        return default_head(loss_fn, [model], config)

    assert head() is None and head(vocab_size=4095) is None
    assert head(vocab_size=4096) == SummedCrossEntropy(None)
    assert head(chunk=100) == SummedCrossEntropy(100)
    assert head(vocab_size=4096, chunk=0) is None
    # A client's loss gets logits; a compiled loss counts as the engine's own.
    assert head(chunk=100, loss_fn=mse_loss) is None
    compiled = torch.compile(cross_entropy_loss, backend="eager")
    assert head(chunk=100, loss_fn=compiled) == SummedCrossEntropy(100)
    assert head(chunk=100, backend="inductor") == SummedCrossEntropy(100, "inductor")
    # Pipeline stages without the output, and outputs that take no head.
    assert head(chunk=100, output=None) is None
    assert head(chunk=100, output=torch.nn.Linear(32, 256)) is None
