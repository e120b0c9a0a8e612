"""Divergences from a teacher without whole logits, against torch's log-softmax of all logits."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distillation_jobs import sums_of
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.distillation import DistillationLoss, TeacherStates
from torchtitan.loss.logprobs import TopTokens
from torchtitan.numerics.low_rank import LowRank
from torchtitan.testing.gloo import run_ranks

ROWS, TOKENS, DIM, TEACHER_DIM, VOCAB = 2, 7, 5, 3, 12
KL_WEIGHT, LABEL_WEIGHT = 0.7, 0.4


def make_inputs(dtype=torch.float64, seed=0):
    """h, weight, the teacher's states and weight, labels, weights of tokens; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (ROWS, TOKENS, DIM), (VOCAB, DIM), (ROWS, TOKENS, TEACHER_DIM), (VOCAB, TEACHER_DIM)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    labels[:, ::3] = IGNORE_INDEX
    weights = torch.rand(ROWS, TOKENS, generator=generator)
    return *tensors, labels, weights


def reference(logits, of_teacher, labels, weights, divergence, top_k, temperature, n_entries=None):
    """(loss, sum of KL, sum of cross entropy) of whole logits, token by token."""
    section = SimpleNamespace(divergence=divergence, temperature=temperature)
    section.kl_weight, section.label_weight = KL_WEIGHT, LABEL_WEIGHT
    section.top_k = top_k % VOCAB  # whole distributions have no rest
    tokens = (x.flatten(0, 1).split(1) for x in (logits, of_teacher[..., :n_entries], labels))
    sums = [sums_of(*token, section) for token in zip(*tokens, strict=True)]
    losses, kl, ce = map(torch.stack, zip(*sums, strict=True))
    return (weights.flatten() * losses).sum(), kl.sum(), ce.sum()


def scores_of(states, weight, labels, top_k, temperature, group=None, n_entries=None):
    """What the student's head gets from the teacher: (entry, the head that keeps its weight)."""
    if not top_k:
        head = TeacherStates(VOCAB)
        return head(states, weight, labels=labels, group=group), head
    top = TopTokens(temperature, k=top_k, with_rest=True, n_entries=n_entries, chunk_tokens=3)
    return top(states, weight, labels=labels, group=group), None


def head_for(scores, divergence, temperature, weights, **options):
    teacher, states = scores
    batch = {"teacher": teacher} | ({} if weights is None else {"loss_weights": weights})
    own = KL_WEIGHT, LABEL_WEIGHT, temperature, states
    return DistillationLoss(divergence, *own, **options).with_batch(batch)


def assert_is_reference(divergence, temperature, top_k, n_entries=None):
    """Values and gradients of the head; n_entries: the vocabulary without what one model pads."""
    h, weight, states, of_teacher, labels, weights = make_inputs()
    h, weight = (t.requires_grad_() for t in (h, weight))
    labels = labels.clamp(max=(n_entries or VOCAB) - 1)
    how = labels, weights, divergence, top_k, temperature
    expected = reference(h @ weight.T, states @ of_teacher.T, *how, n_entries)
    gradients = torch.autograd.grad(expected[0], (h, weight))
    scores = scores_of(states, of_teacher, labels, top_k, temperature, n_entries=n_entries)
    head = head_for(scores, divergence, temperature, weights, n_entries=n_entries, chunk_tokens=3)
    outputs = head(h, weight, labels=labels)
    # The scores of the k most probable tokens are stored in fp32.
    rtol, atol = (2e-6, 1e-6) if top_k else (1e-11, 1e-12)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    for value, known in zip(outputs[:3], expected, strict=True):
        close(value.double(), known.detach())
    assert [x.requires_grad for x in outputs[:3]] == [True, False, False]
    (3 * outputs.loss).backward()
    for tensor, gradient in zip((h, weight), gradients, strict=True):
        close(tensor.grad, 3 * gradient)


@pytest.mark.parametrize("top_k", [0, 1, 4, VOCAB])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_head_has_the_values_and_gradients_of_whole_logits(divergence, temperature, top_k):
    assert_is_reference(divergence, temperature, top_k)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_rest_of_a_certain_teacher_has_its_small_probability(divergence):
    """1 minus the probabilities of the chosen tokens would be 0 in fp32."""
    of_teacher = torch.tensor([[[30.0, 5, 4, 3]]])  # top_k = 1
    logits, labels = torch.tensor([[[1.0, 2, 0, 1]]]), torch.tensor([[0]])
    unit = torch.eye(4)
    scores = scores_of(of_teacher, unit, labels, 1, 1.0)
    found = head_for(scores, divergence, 1.0, None)(logits, unit, labels=labels)
    weights = torch.ones(1, 1)
    expected = reference(logits, of_teacher, labels, weights, divergence, 1, 1.0)
    assert found.kl.item() == pytest.approx(expected[1].item(), rel=1e-5)


@pytest.mark.parametrize("top_k", [0, 4])
def test_entries_that_one_model_pads_have_no_part_in_the_divergence(top_k):
    assert_is_reference("reverse", 1.0, top_k, n_entries=9)


def test_adapter_of_the_output_is_part_of_the_student():
    h, weight, states, of_teacher, labels, weights = make_inputs()
    a = torch.linspace(-1, 1, 2 * DIM, dtype=h.dtype).view(1, 2, DIM)
    b = torch.randn(1, VOCAB, 2, dtype=h.dtype, requires_grad=True)
    low_rank = LowRank(h, a, b, [ROWS * TOKENS], 0.5)
    logits = h @ weight.T + 0.5 * h @ low_rank.a[0].T @ b[0].T
    expected = reference(logits, states @ of_teacher.T, labels, weights, "forward", 0, 1.0)
    (gradient,) = torch.autograd.grad(expected[0], b)
    head = head_for(scores_of(states, of_teacher, labels, 0, 1.0), "forward", 1.0, weights)
    head(h, weight, labels=labels, low_rank=low_rank).loss.backward()
    torch.testing.assert_close(b.grad, gradient)


def parts_on_rank(divergence, top_k, n_entries):
    """Outputs with this rank's entries, the gradient of h over ranks, and of this rank's weight."""
    h, weight, states, of_teacher, labels, weights = make_inputs()
    rank, group = dist.get_rank(), dist.group.WORLD
    own, own_teacher = (
        w.chunk(2)[rank].contiguous().requires_grad_() for w in (weight, of_teacher)
    )
    scores = scores_of(states, own_teacher.detach(), labels, top_k, 2.0, group, n_entries)
    h.requires_grad_()
    head = head_for(scores, divergence, 2.0, weights, n_entries=n_entries, chunk_tokens=5)
    outputs = head(h, own, labels=labels, group=group)
    outputs.loss.backward()
    dist.all_reduce(h.grad)
    return [t.detach() for t in outputs[:3]], h.grad, own.grad


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("divergence, n_entries", [("forward", None), ("reverse", 5)])
def test_ranks_that_split_the_vocabulary_have_the_values_of_one(divergence, top_k, n_entries):
    h, weight, states, of_teacher, labels, weights = make_inputs()
    scores = scores_of(states, of_teacher, labels, top_k, 2.0, None, n_entries)
    h, weight = (t.requires_grad_() for t in (h, weight))
    head = head_for(scores, divergence, 2.0, weights, n_entries=n_entries)
    outputs = head(h, weight, labels=labels)
    outputs.loss.backward()
    ranks = run_ranks(parts_on_rank, 2, divergence, top_k, n_entries)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    for values, grad_h, _ in ranks:
        for value, known in zip(values, outputs[:3], strict=True):
            close(value, known.detach())
        close(grad_h, h.grad)
    close(torch.cat([grad for *_, grad in ranks]), weight.grad)
