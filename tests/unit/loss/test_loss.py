import pytest
import torch

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


def batch(rows: int, seq_len: int, valid: float = 1.0):
    """Logits [rows, seq_len, VOCAB] fp32 and labels [rows, seq_len], the first ones valid."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, seq_len, VOCAB, generator=generator)
    labels = torch.randint(0, VOCAB, (rows, seq_len), generator=generator)
    labels[:, int(seq_len * valid) :] = IGNORE_INDEX
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_the_sum_of_minus_log_probabilities_in_fp32(dtype):
    logits, labels = batch(2, 5, valid=0.6)
    logits = logits.to(dtype).requires_grad_()
    counted = labels != IGNORE_INDEX
    log_probs = logits.double().log_softmax(-1)[counted]
    expected = -log_probs.gather(-1, labels[counted][:, None]).sum()
    loss = cross_entropy_loss(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x, logits)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients)


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
