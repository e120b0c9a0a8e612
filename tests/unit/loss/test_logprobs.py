"""Log-probs and entropies without logits, against torch's log-softmax of all logits."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.unit.models.tiny import Operators, filled, on_meta
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.cross_entropy import SummedCrossEntropy
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs, TopTokens, token_logprobs
from torchtitan.models import _supported_models
from torchtitan.numerics.low_rank import LowRank
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.testing.gloo import run_ranks

ROWS, TOKENS, DIM, VOCAB = 2, 7, 5, 13


def make_inputs(dtype=torch.float64, seed=0):
    """h, weight, bias, labels; every third label is ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (ROWS, TOKENS, DIM), (VOCAB, DIM), (VOCAB,)
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    labels[:, ::3] = IGNORE_INDEX
    return *tensors, labels


def reference(logits, labels, temperature) -> TokenOutputs:
    log_probs = torch.log_softmax(
        logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1
    )
    chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return TokenOutputs(chosen.masked_fill(labels == IGNORE_INDEX, 0), entropy)


def some_loss(outputs: TokenOutputs, fields=TokenOutputs._fields) -> torch.Tensor:
    """A loss with another gradient for every token and for each of the fields that is not None."""
    factors = torch.linspace(-1, 2, ROWS * TOKENS, dtype=outputs.logprobs.dtype).view(ROWS, TOKENS)
    values = [getattr(outputs, name) for name in fields]
    return sum((x * factors**i).sum() for i, x in enumerate(values, 1) if x is not None)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 14, 100])
@pytest.mark.parametrize("fields", [["logprobs"], ["entropy"], ["logprobs", "entropy"]], ids=str)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_head_has_the_values_and_gradients_of_log_softmax(chunk_tokens, fields, cap):
    """fields: of the outputs, in the loss."""
    h, weight, bias, labels = make_inputs()
    logits = torch.nn.functional.linear(h, weight, bias)
    temperature = torch.linspace(0.5, 2, ROWS * TOKENS).view(ROWS, TOKENS)
    capped = logits if cap is None else cap * (logits / cap).tanh()
    expected = reference(capped, labels, temperature[..., None])
    gradients = torch.autograd.grad(some_loss(expected, fields), (h, weight, bias))
    has_entropy = "entropy" in fields
    head = TokenLogProbs(temperature, has_entropy, chunk_tokens)
    outputs = head(h, weight, bias, labels=labels, cap=cap)
    torch.testing.assert_close(outputs.logprobs, expected.logprobs)
    if has_entropy:
        torch.testing.assert_close(outputs.entropy, expected.entropy)
    else:
        assert outputs.entropy is None
    some_loss(outputs, fields).backward()
    for tensor, gradient in zip((h, weight, bias), gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 14, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_summed_loss_and_its_gradients_are_those_of_whole_logits(chunk_tokens, dtype):
    h, weight, bias, labels = make_inputs(dtype)
    logits = torch.nn.functional.linear(h, weight, bias)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    expected = -3 * reference(logits, labels, 1.0).logprobs.sum()
    gradients = torch.autograd.grad(expected, (h, weight, bias))
    loss = 3 * SummedCrossEntropy(chunk_tokens)(h, weight, bias, labels=labels)
    digits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(loss, expected, rtol=min(digits, 1e-6), atol=0)
    loss.backward()
    for tensor, gradient in zip((h, weight, bias), gradients, strict=True):
        scale = gradient.abs().max().item()
        torch.testing.assert_close(tensor.grad, gradient, rtol=digits, atol=digits * scale)


@pytest.mark.parametrize("chunk_tokens", [2, 4, 100])
@pytest.mark.parametrize("head", [SummedCrossEntropy, partial(TokenLogProbs, entropy=True)])
def test_adapters_of_several_models_change_the_logits_of_their_tokens(head, chunk_tokens):
    h, weight, bias, labels = make_inputs()
    generator, sizes = torch.Generator().manual_seed(1), [3, 0, 11]
    shapes = h.shape, (3, 2, DIM), (3, VOCAB, 2)
    x, a, b = (torch.randn(s, generator=generator).to(h).requires_grad_() for s in shapes)
    models = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    added = torch.einsum("nm,nrm,nvr->nv", x.flatten(0, 1), a[models], b[models])
    adapters = LowRank(x, a, b, sizes, 0.3)
    logits = torch.nn.functional.linear(h, weight, bias) + 0.3 * added.view(ROWS, TOKENS, VOCAB)
    expected = reference(logits, labels, 1.0)
    found = head(chunk_tokens=chunk_tokens)(h, weight, bias, labels=labels, low_rank=adapters)
    if isinstance(found, TokenOutputs):
        torch.testing.assert_close(found, expected)
        losses = some_loss(found), some_loss(expected)
    else:
        losses = found, -expected.logprobs.sum()
    gradients = [torch.autograd.grad(loss, (h, weight, bias, x, a, b)) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    top = TopTokens(k=3, chunk_tokens=chunk_tokens)
    tokens = top(h, weight, bias, labels=labels, low_rank=adapters)[..., :3]
    assert torch.equal(tokens.long(), logits.topk(3).indices)


def test_gradients_of_a_models_adapters_have_the_bits_of_it_alone():
    sizes, generator = [14, 5, 16], torch.Generator().manual_seed(1)
    shapes = (1, sum(sizes), 16), (32, 16), (3, 2, 16), (3, 32, 2)
    h, weight, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    labels = torch.randint(0, 32, h.shape[:2], generator=generator)
    if not torch.equal((h[0] @ weight.t())[:5], h[0, :5] @ weight.t()):
        pytest.skip("this CPU's library rounds a row differently beside other rows")
    head = TokenLogProbs(chunk_tokens=10)

    def run(rows, models, sizes):
        own = a[models].requires_grad_(), b[models].requires_grad_()
        adapters = LowRank(h[:, rows], *own, sizes, 0.3)
        found = head(h[:, rows], weight, labels=labels[:, rows], low_rank=adapters).logprobs
        return found.detach(), *torch.autograd.grad(found.sum(), own)

    logprobs, *together = run(slice(None), slice(None), sizes)  # chunks of 10, 4 + 5, 10 and 6
    begin = 0
    for model, size in enumerate(sizes):
        rows, own = slice(begin, begin + size), slice(model, model + 1)
        found, *alone = run(rows, own, [size])
        assert torch.equal(found, logprobs[:, rows])
        for of_all, of_one in zip(together, alone, strict=True):
            assert torch.equal(of_all[own], of_one)
        begin += size


def values_of_vocabulary_parts(n_ranks):
    """Return this rank's results of both heads, and the gradients of whole and of split tensors."""
    h, weight, bias, labels = make_inputs()
    n_entries = VOCAB - 1  # divisible by two ranks
    weight, bias = weight.detach()[:n_entries], bias.detach()[:n_entries]
    bias[6:] += 4.0  # ranks have different highest logits
    labels = labels.clamp(max=n_entries - 1)
    rank, group = (dist.get_rank(), dist.group.WORLD) if n_ranks > 1 else (0, None)
    own = [part.chunk(n_ranks)[rank].clone().requires_grad_() for part in (weight, bias)]
    results = [([TopTokens(k=4, chunk_tokens=3)(h, *own, labels=labels, group=group)], ())]
    outputs = TokenLogProbs(entropy=True, chunk_tokens=3)(h, *own, labels=labels, group=group)
    loss = SummedCrossEntropy(3)(h, *own, labels=labels, group=group)
    for values, scalar in ((outputs, some_loss(outputs)), ([loss], loss)):
        gradients = torch.autograd.grad(scalar, (h, *own))
        results.append(([value.detach() for value in values], gradients))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "head",
    [SummedCrossEntropy, TokenLogProbs, partial(TokenLogProbs, temperature=0.7, entropy=True)],
)
def test_compiled_chunks_compute_the_same(head, dtype):
    h, weight, bias, labels = make_inputs(dtype)
    results = []
    for backend in (None, "aot_eager"):
        outputs = head(chunk_tokens=5, compile_backend=backend)(h, weight, bias, labels=labels)
        loss = outputs if isinstance(outputs, torch.Tensor) else some_loss(outputs)
        results.append([loss, *torch.autograd.grad(loss, (h, weight, bias))])
    # The eager loss rounds its gradients once more.
    tolerances = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(results[1], results[0], **tolerances)


def test_ranks_that_share_the_vocabulary_compute_what_one_does():
    whole = values_of_vocabulary_parts(1)
    ranks = run_ranks(values_of_vocabulary_parts, 2, 2)
    for (values, gradients), *of_ranks in zip(whole, *ranks, strict=True):
        for found, _ in of_ranks:
            torch.testing.assert_close(found, values)
        if gradients:
            of_h, of_weight, of_bias = zip(*(found for _, found in of_ranks), strict=True)
            joined = sum(of_h), torch.cat(of_weight), torch.cat(of_bias)
            torch.testing.assert_close(joined, gradients, rtol=1e-10, atol=1e-12)


def test_gradients_of_many_chunks_in_bf16_are_added_up_in_fp32():
    """In bf16 a sum of ones stops growing at 256."""
    weight, bias = (torch.zeros(shape).bfloat16().requires_grad_() for shape in ((2, 1), (2,)))
    h, labels = torch.ones(1, 1000, 1).bfloat16(), torch.zeros(1, 1000, dtype=torch.int64)
    SummedCrossEntropy(1)(h, weight, bias, labels=labels).backward()
    assert weight.grad.flatten().tolist() == bias.grad.tolist() == [-500, 500]


def test_summed_loss_keeps_no_gradient_where_none_is_wanted():
    h, weight, _, labels = make_inputs()
    whole = -reference(torch.nn.functional.linear(h, weight), labels, 1.0).logprobs.sum()
    with torch.no_grad():
        loss = SummedCrossEntropy(3)(h, weight, labels=labels)
    torch.testing.assert_close(loss, whole.detach())
    SummedCrossEntropy(3)(h, weight.detach(), labels=labels).backward()
    assert h.grad is not None and weight.grad is None


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_that_exist_give_the_same_as_a_head_and_are_left_alone(entropy):
    h, weight, bias, labels = make_inputs()
    logits = (h @ weight.T + bias).detach().requires_grad_()
    before = logits.detach().clone()
    expected = reference(logits, labels, 2.0)
    expected = expected if entropy else TokenOutputs(expected.logprobs, None)
    (gradient,) = torch.autograd.grad(some_loss(expected), logits)
    outputs = token_logprobs(logits, labels, temperature=2.0, entropy=entropy)
    some_loss(outputs).backward()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-12, atol=1e-14)
    assert torch.equal(logits, before)


def test_temperature_of_0_is_for_padding_alone():
    logits, labels = torch.zeros(1, 2, 3), torch.tensor([[1, IGNORE_INDEX]])
    token_logprobs(logits, labels, temperature=torch.tensor([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="must be above 0, got 0.0"):
        token_logprobs(logits, labels, temperature=torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_logits_are_normalized_in_fp32(autocast):
    h, weight, _, labels = make_inputs(torch.float32 if autocast else torch.bfloat16)
    h16, weight16 = h.detach().bfloat16(), weight.detach().bfloat16()
    expected = reference(h16 @ weight16.T, labels, 1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = TokenLogProbs(entropy=True, chunk_tokens=4)(h, weight, labels=labels)
        outputs.logprobs.sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-6)
    assert weight.grad.dtype == weight.dtype
    # The sum is rounded once, and so is each chunk's product.
    exact, exact_h = weight16.double().requires_grad_(), h16.double()
    reference(exact_h @ exact.T, labels, 1.0).logprobs.sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=0.02, atol=0.03)


def test_large_logits_lose_no_digits():
    logits = torch.tensor([[[1000.0, 1001.0, 990.0]]])
    outputs = token_logprobs(logits, torch.tensor([[0]]), entropy=True)
    expected = reference(logits.double(), torch.tensor([[0]]), 1.0)
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=0, check_dtype=False)


@pytest.mark.parametrize(
    "head", [SummedCrossEntropy, TokenLogProbs, partial(TokenLogProbs, entropy=True)]
)
def test_logits_of_one_chunk_are_the_largest_tensor_in_forward_and_backward(head):
    n_tokens, dim, vocab, chunk = 64, 4, 100, 8
    h = torch.randn(1, n_tokens, dim, requires_grad=True)
    weight = torch.randn(vocab, dim, requires_grad=True)
    labels = torch.randint(0, vocab, (1, n_tokens))
    with Operators() as operators:
        outputs = head(chunk_tokens=chunk)(h, weight, labels=labels)
        values = outputs if isinstance(outputs, TokenOutputs) else [outputs]
        sum(value.sum() for value in values if value is not None).backward()
    assert max(math.prod(shape) for _, shape in operators.calls if shape) == chunk * vocab


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_batch_without_tokens_has_outputs_without_tokens(shape):
    h = torch.zeros(*shape, DIM, requires_grad=True)
    weight = torch.zeros(VOCAB, DIM, requires_grad=True)
    labels = torch.zeros(shape, dtype=torch.int64)
    outputs = TokenLogProbs(entropy=True)(h, weight, labels=labels)
    assert outputs.logprobs.shape == outputs.entropy.shape == shape
    outputs.logprobs.sum().backward()
    assert weight.grad.count_nonzero() == 0
    loss = SummedCrossEntropy()(h, weight, labels=labels)
    loss.backward()
    assert loss == 0 and weight.grad.count_nonzero() == 0
    assert token_logprobs(torch.zeros(*shape, VOCAB), labels).logprobs.shape == shape


def test_settings_and_labels_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="temperature of log-probabilities must be above 0, got 0"):
        TokenLogProbs(temperature=0)
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        TokenLogProbs(chunk_tokens=0)
    with pytest.raises(ValueError, match=r"one entry per token, \[2, 3\], got \[2, 4\]"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 4))


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_labels_outside_the_vocabulary_are_refused(label):
    labels = torch.tensor([[0, label, VOCAB - 1, -100]])
    message = rf"in \[0, {VOCAB}\) or -100.*got \[{label}\]"
    with pytest.raises(ValueError, match=message):
        token_logprobs(torch.zeros(1, 4, VOCAB), labels)
    with pytest.raises(ValueError, match=message):
        TokenLogProbs()(torch.zeros(1, 4, DIM), torch.zeros(VOCAB, DIM), labels=labels)


@pytest.mark.parametrize("family", sorted(_supported_models))
def test_every_family_takes_a_head(family):
    spec = get_train_spec(family)
    args = spec.model_args["debugmodel_small" if family == "gpt_oss" else "debugmodel"]
    model = filled(on_meta(spec.model_cls, args).to_empty(device="cpu"))
    tokens = torch.randint(0, 100, (1, 9))
    masks = model.get_attention_masks(tokens, None) if args.attn_type != "sdpa" else None
    labels = torch.randint(0, 100, (1, 9))
    expected = token_logprobs(model(tokens, attention_masks=masks), labels, entropy=True)
    expected.logprobs.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    head = partial(TokenLogProbs(entropy=True, chunk_tokens=4), labels=labels)
    outputs = model(tokens, attention_masks=masks, head=head)
    outputs.logprobs.sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        atol = 1e-5 * max(1, gradient.abs().max().item())  # sums in another order
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=atol)
