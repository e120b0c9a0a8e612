"""Mixture of experts against slow loops that share no code with it."""

import pytest
import torch
from torch.nn import functional as F

from torchtitan.models.moe import MoEArgs, build_moe
from torchtitan.models.moe import moe as moe_module

DIM, HIDDEN = 16, 24


def build(seed=0, dtype=torch.float32, **changes):
    """A layer whose scores differ a lot, so that rounding doesn't change which experts win."""
    args = MoEArgs(**{"num_experts": 6, "top_k": 2, "num_shared_experts": 0} | changes)
    torch.manual_seed(seed)
    moe = build_moe(args, DIM, HIDDEN)
    with torch.no_grad():
        moe.init_weights(0.2)
        moe.experts.w1.normal_(std=0.2)
        moe.router.gate.weight.normal_(std=0.5)
    return moe.to(dtype)


def tokens(*shape, seed=1):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))


def swiglu(x, w1, w2, w3):
    return w2 @ (F.silu(w1 @ x) * (w3 @ x))


def slow_choice(args, scores, bias):
    """Ids of the chosen experts of one token, best first."""
    choice = (scores + bias).tolist()
    candidates = range(args.num_experts)
    if args.num_expert_groups is not None:
        size = args.num_experts // args.num_expert_groups
        groups = [list(candidates[i : i + size]) for i in range(0, args.num_experts, size)]
        num_best = 2 if args.group_score == "top2_sum" else 1

        def group_score(group):
            return sum(sorted((choice[e] for e in group), reverse=True)[:num_best])

        best = sorted(groups, key=group_score, reverse=True)[: args.num_limited_groups]
        candidates = [e for group in best for e in group]
    return sorted(candidates, key=lambda e: choice[e], reverse=True)[: args.top_k]


def slow_moe(moe, args, x, replayed=None):
    """Token by token, expert by expert. x: [B, S, D]. Returns (out, tokens per expert).

    replayed: [B, S, k], or None; a row of -1 is a token whose experts the router chooses.
    """
    given = [None] * x.shape[:2].numel() if replayed is None else replayed.flatten(0, 1).tolist()
    bias = torch.zeros(args.num_experts) if moe.expert_bias is None else moe.expert_bias
    counts = [0.0] * args.num_experts
    rows = []
    for token, experts in zip(x.reshape(-1, DIM), given, strict=True):
        logits = moe.router.gate.weight @ token
        if args.gate_bias:
            logits = logits + moe.router.gate.bias
        scores = logits.sigmoid() if args.score_func == "sigmoid" else logits.softmax(0)
        chosen = slow_choice(args, scores.detach(), bias)
        if experts is not None and experts[0] >= 0:
            chosen = experts
        total = sum(scores[e] for e in chosen) if args.route_norm else 1.0
        out = torch.zeros(DIM)
        for e in chosen:
            counts[e] += 1
            weight = scores[e] / total * args.route_scale
            w1, w2, w3 = moe.experts.w1[e], moe.experts.w2[e], moe.experts.w3[e]
            if args.score_before_experts:
                out = out + swiglu(weight * token, w1, w2, w3)
            else:
                out = out + weight * swiglu(token, w1, w2, w3)
        if moe.shared_experts is not None:
            out = out + moe.shared_experts(token)
        rows.append(out)
    return torch.stack(rows).view_as(x), counts


AFTER = {"route_norm": True, "score_before_experts": False}
CHOICES = {
    "sigmoid, score before": {},
    "top 1 with shared expert": {"top_k": 1, "num_shared_experts": 1},
    "softmax normalised, score after": {"score_func": "softmax"} | AFTER,
    "scaled, gate bias, two shared experts": {"route_scale": 2.5, "gate_bias": True}
    | {"num_shared_experts": 2}
    | AFTER,
    "groups by their two best": {"num_expert_groups": 3, "num_limited_groups": 2, "top_k": 3},
    "groups by their best": {"num_expert_groups": 3, "num_limited_groups": 1, "group_score": "max"},
    "loop": {"use_grouped_mm": False},
    "no balancing": {"load_balance_coeff": None},
}


def random_experts(args, n_rows, n_tokens):
    """Different experts for each token [B, S, k], in any order; every third token has none."""
    noise = torch.rand(n_rows, n_tokens, args.num_experts, generator=torch.manual_seed(3))
    experts = noise.argsort(dim=-1)[..., : args.top_k].to(torch.int16)
    experts[:, ::3] = -1
    return experts


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_outputs_counts_and_all_gradients_equal_a_slow_loop(name, replays):
    moe = build(**CHOICES[name])
    args = MoEArgs(**{"num_experts": 6, "top_k": 2, "num_shared_experts": 0} | CHOICES[name])
    if moe.expert_bias is not None:
        moe.expert_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    if args.gate_bias:
        moe.router.gate.bias.data.copy_(torch.linspace(1, -1, 6))
    replayed = random_experts(args, 2, 7) if replays else None
    results = []
    for run in (
        lambda x: (moe(x, replayed), moe.tokens_per_expert.tolist()),
        lambda x: slow_moe(moe, args, x, replayed),
    ):
        x = tokens(2, 7).requires_grad_()
        moe.zero_grad()
        out, counts = run(x)
        out.backward(tokens(2, 7, seed=2))
        gradients = {n: p.grad.clone() for n, p in moe.named_parameters() if p.grad is not None}
        results.append((out, counts, x.grad, gradients))
    assert results[0][1] == results[1][1] and sum(results[0][1]) == 14 * args.top_k
    assert results[0][3].keys() == results[1][3].keys()
    assert "router.gate.weight" in results[0][3]
    # fp32 sums of up to 24 terms of about 1, in another order.
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [[3, 0, 4, 0], [0, 0, 7, 0], [0, 0, 0, 0], [2, 2, 2, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_the_loop(dtype, counts):
    torch.manual_seed(0)
    weights = [torch.randn(4, *shape, dtype=dtype) / 4 for shape in ((24, 16), (16, 24), (24, 16))]
    results = []
    for run in (moe_module._run_experts_grouped_mm, moe_module._run_experts_for_loop):
        inputs = [t.clone().requires_grad_() for t in (*weights, tokens(7).to(dtype))]
        out = run(*inputs, torch.tensor(counts))[: sum(counts)]
        assert out.dtype == dtype
        out.sum().backward()  # the gradient is an expanded scalar, which the bare kernel refuses
        results.append([out, *(t.grad for t in inputs[:3]), inputs[3].grad[: sum(counts)]])
    # bf16: a matrix of one row, or none, may be summed in another order.
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (0.02, 0.02)
    torch.testing.assert_close(*results, rtol=rtol, atol=atol)


def test_autocast_computes_experts_in_bf16_and_the_router_in_fp32():
    moe = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, experts, _ = moe.router(tokens(5))
        out = moe(tokens(1, 5))
    plain_scores, plain_experts, _ = moe.router(tokens(5))
    assert torch.equal(scores, plain_scores) and torch.equal(experts, plain_experts)
    assert not torch.equal(out, moe(tokens(1, 5)))
    torch.testing.assert_close(out, moe(tokens(1, 5)), rtol=0.05, atol=0.02)


def test_router_in_bf16_chooses_what_fp32_arithmetic_on_the_same_numbers_chooses():
    moe = build(num_experts=64, top_k=8, dtype=torch.bfloat16)
    x = tokens(200).bfloat16()
    scores, experts, _ = moe.router(x)
    exact = torch.sigmoid(x.double() @ moe.router.gate.weight.double().T).topk(8)
    assert scores.dtype == torch.float32
    assert torch.equal(experts.sort().values, exact.indices.sort().values)


def test_router_of_bf16_matrices_on_an_accelerator_is_that_of_their_fp32_copies():
    """The kernel is emulated here: products of bf16 numbers, exact in fp32, are summed in it."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*s, generator=generator) for s in ((9, 32), (5, 32), (9, 5)))
    leaves = [t.bfloat16().requires_grad_() for t in (x, weight)]
    copies = [t.detach().float().requires_grad_() for t in leaves]
    logits, expected = moe_module._LinearToFp32.apply(*leaves), F.linear(*copies)
    assert torch.equal(logits, expected)
    found = torch.autograd.grad(logits, leaves, grad)
    for got, exact in zip(found, torch.autograd.grad(expected, copies, grad), strict=True):
        # bf16 has 8 bits, to which the result is rounded; its halves alone would be off by more.
        error = (got.float() - exact).abs()
        assert got.dtype == torch.bfloat16 and (error <= 2**-8 * exact.abs() + 1e-4).all()


def test_experts_hear_of_the_counts_before_the_tokens_are_gathered_and_shared_experts_run():
    moe, order = build(num_shared_experts=1), []
    moe.experts.announce_counts = lambda counts: order.append(("counts", counts))
    moe.shared_experts.register_forward_hook(lambda *_: order.append(("shared", None)))
    moe.experts.register_forward_pre_hook(lambda _, args: order.append(("experts", args[1])))
    moe(tokens(1, 4))
    assert [name for name, _ in order] == ["counts", "shared", "experts"]
    assert order[0][1] is order[2][1]  # so that the dispatch recognises the same counts


def test_only_training_forwards_with_gradients_are_counted():
    moe = build()
    with torch.no_grad():
        moe(tokens(2, 4))
    assert moe.tokens_per_expert.sum() == 0
    moe.eval()(tokens(2, 4))
    assert moe.tokens_per_expert.sum() == 0
    moe.train()(tokens(2, 4))
    moe(tokens(1, 3))
    assert moe.tokens_per_expert.sum() == 2 * 11


def test_forced_balance_sends_tokens_in_turn_and_keeps_their_own_scores():
    moe = build(_debug_force_load_balance=True)
    scores, experts, counts = moe.router(tokens(6))
    assert experts.tolist() == [[0, 1], [2, 3], [4, 5]] * 2 and counts.tolist() == [2] * 6
    all_scores = (tokens(6) @ moe.router.gate.weight.T).sigmoid()
    torch.testing.assert_close(scores, all_scores.gather(1, experts))


ONE_OF_3 = {"num_expert_groups": 3, "num_limited_groups": 1}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_expert_groups": 3}, "num_limited_groups = None"),
        (ONE_OF_3 | {"num_limited_groups": 4}, "num_limited_groups = 4"),
        (ONE_OF_3 | {"num_expert_groups": 4}, "= 4 must divide"),
        (ONE_OF_3 | {"num_expert_groups": 6}, "groups of 2 or more"),
        (ONE_OF_3 | {"group_score": "mean"}, "group_score = 'mean'"),
        (ONE_OF_3 | {"top_k": 3}, "top_k"),
        ({"top_k": 7}, "top_k"),
        ({"load_balance_coeff": 0.0}, "load_balance_coeff"),
    ],
)
def test_numbers_that_do_not_go_together_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_unknown_score_is_named():
    with pytest.raises(NotImplementedError, match="score_func"):
        build(score_func="relu")


def test_init_weights_zeroes_the_buffers_of_a_meta_model():
    with torch.device("meta"):
        moe = build_moe(MoEArgs(gate_bias=True), DIM, HIDDEN)
    moe.to_empty(device="cpu")
    with torch.no_grad():
        moe.init_weights(0.01, torch.device("cpu"))
    assert torch.all(moe.expert_bias == 0) and torch.all(moe.tokens_per_expert == 0)
    assert torch.all(moe.router.gate.bias == 0)
    assert moe.experts.w1.std().item() == pytest.approx(0.02, rel=0.1)
    for weight in (moe.experts.w2, moe.experts.w3, moe.router.gate.weight):
        assert weight.std().item() == pytest.approx(0.01, rel=0.15)
