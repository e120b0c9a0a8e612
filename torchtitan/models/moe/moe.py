"""Mixture of experts: a router sends each token to its k best experts, each a feed-forward.

B rows, S tokens in a row, T = B * S, D model dim, E experts, k experts per token, H hidden size
of an expert, N tokens in one call of the experts.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.distributed.dtensor import is_dtensor, local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.distributed.token_groups import inverse_rows, take_rows
from torchtitan.models.feed_forward import PROJECTION_STD, FeedForward, init_linear
from torchtitan.models.moe.args import MoEArgs
from torchtitan.models.moe.grouped_mm import grouped_linear
from torchtitan.models.moe.utils import indices_padding_wrapper
from torchtitan.numerics.linear import Linear, linear
from torchtitan.tools.logging import logger, warn_once

# ---- experts ----


class StackedExperts(nn.Module):
    """E feed-forwards of one shape; subclasses create their parameters, stacked along dim 0."""

    reads_local_parameters: ClassVar[bool] = True
    # Set by expert parallelism; called with the next forward's counts as soon as they are known.
    announce_counts: Callable[[Tensor], None] | None = None

    def __init__(self, num_experts: int, use_grouped_mm: bool, feed_forward: Callable[..., Tensor]):
        super().__init__()
        self.num_experts = num_experts
        self.use_grouped_mm = use_grouped_mm
        self._feed_forward = feed_forward
        self._compiled_grouped_mm: Callable[..., Tensor] | None = None

    def local_parameters(self) -> tuple[Tensor, ...]:
        """Return this rank's parts of the parameters, in the order that `feed_forward` takes them."""
        raise NotImplementedError

    def groups(self, selected: Tensor) -> tuple[Tensor, int]:
        """Return the group of each (token, expert) pair of `selected` [T, k], and the number of groups.

        Here each expert is one group; a subclass may give each expert several consecutive groups.
        """
        return selected, self.num_experts

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """x: [N, D], sorted by group. num_tokens_per_expert: tokens per group, int [E * n]. Returns [N, D].

        A group is one expert's tokens. With `MultiLoRA` each expert has n groups, one for the tokens of each
        model. Under expert parallelism E counts this rank's experts, and groups are padded.
        """
        parameters = self.local_parameters()
        has_autocast = torch.is_autocast_enabled(x.device.type)
        cast_to = torch.get_autocast_dtype(x.device.type) if has_autocast else None
        can_group = all(
            p.dtype == torch.uint8 or p.shape[-1] * (cast_to or p.dtype).itemsize % 16 == 0
            for p in parameters
        )
        if self.use_grouped_mm and not can_group:
            warn_once(
                logger,
                f"experts of shape {list(parameters[0].shape[1:])} are computed one by one, because "
                "the grouped kernel needs dim, hidden_dim and lora.rank to be multiples of 16 bytes",
            )
        if not (self.use_grouped_mm and can_group):
            return run_for_loop(self._feed_forward, *parameters, x, num_tokens_per_expert)
        run = self._compiled_grouped_mm or partial(run_grouped_mm, self._feed_forward)
        if _needs_padding(next(self.parameters())):
            run = indices_padding_wrapper(run)
        return run(*parameters, x, num_tokens_per_expert)

    def compile_products(self, **options: Any) -> None:
        """Compile only the matrix products of this layer with torch.compile."""
        if self._compiled_grouped_mm is None:
            run = partial(run_grouped_mm, self._feed_forward)
            self._compiled_grouped_mm = torch.compile(run, **options)


class GroupedExperts(StackedExperts):
    """E SwiGLU feed-forwards: w1, w3 [E, H, D], w2 [E, D, H]."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool):
        super().__init__(num_experts, use_grouped_mm, _swiglu)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def local_parameters(self) -> tuple[Tensor, ...]:
        return tuple(local_parameter(w) for w in (self.w1, self.w2, self.w3))

    def init_weights(self, init_std: float) -> None:
        trunc_normal_(self.w1, mean=0.0, std=PROJECTION_STD)
        trunc_normal_(self.w2, mean=0.0, std=init_std)
        trunc_normal_(self.w3, mean=0.0, std=init_std)


def _swiglu(linear: Callable[..., Tensor], x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """SwiGLU, as a `feed_forward` for `run_for_loop`."""
    return linear(F.silu(linear(x, w1)) * linear(x, w3), w2)


def run_for_loop(feed_forward: Callable[..., Tensor], *parameters_x_and_counts: Tensor) -> Tensor:
    """Return [N, D], computed one expert after the other; waits for the device to read the counts.

    feed_forward: (linear, x, *parameters) -> out; calls `linear(x, weights, biases=None)`.
    parameters: [E, ...] each, weights laid out like a Linear's; x: [N, D], grouped by expert;
        counts: rows per expert [E] int. Rows that belong to no expert get zeros.
    """
    *parameters, x, num_tokens_per_expert = parameters_x_and_counts
    counts = num_tokens_per_expert.tolist()
    num_tokens = sum(counts)
    linear = partial(_looped_linear, counts=counts)
    out = feed_forward(linear, x[:num_tokens], *parameters).type_as(x)
    return torch.cat([out, x.new_zeros(x.shape[0] - num_tokens, x.shape[-1])])


def _looped_linear(
    x: Tensor, weights: Tensor, biases: Tensor | None = None, *, counts: Sequence[int]
) -> Tensor:
    """`grouped_linear` as a loop, one product per entry of `weights`. counts: rows of each group."""
    n = len(counts) // len(weights)
    groups = x.split([sum(counts[i : i + n]) for i in range(0, len(counts), n)])
    # Unbind, because the gradient of one indexed weight is as large as all experts together.
    operands = groups, weights.unbind(), *([] if biases is None else [biases.unbind()])
    return torch.cat([linear(*each) for each in zip(*operands, strict=True)])


def run_grouped_mm(feed_forward: Callable[..., Tensor], *parameters_x_and_counts: Tensor) -> Tensor:
    """As `run_for_loop`, in the weights' dtype, with one kernel per weight and without waiting for the device.

    Rows that belong to no expert are undefined.
    """
    *parameters, x, num_tokens_per_expert = parameters_x_and_counts
    offsets = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), x.dtype)
    if torch.is_autocast_enabled(x.device.type):  # autocast does not cast for this kernel
        dtype = torch.get_autocast_dtype(x.device.type)
        parameters = [p.to(dtype) if p.is_floating_point() else p for p in parameters]
    linear = partial(grouped_linear, offsets=offsets)
    return feed_forward(linear, x.to(dtype), *parameters).type_as(x)


_run_experts_for_loop = partial(run_for_loop, _swiglu)
_run_experts_grouped_mm = partial(run_grouped_mm, _swiglu)


def _needs_padding(parameter: Tensor) -> bool:
    """Return True if the tokens of each expert still have to be padded for the kernel."""
    if parameter.device.type == "cpu":
        return False
    # Under expert parallelism, sorting the received tokens has padded them already.
    return not (is_dtensor(parameter) and "ep" in (parameter.device_mesh.mesh_dim_names or ()))


# ---- routing ----


class RouterGate(nn.Linear):
    """A Linear that computes in fp32 for every dtype of input and weight.

    In bf16, scores that are close would tie or swap, which would change the choice of experts.
    """

    reads_local_parameters: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns fp32 logits [T, E]."""
        weight, bias = local_parameter(self.weight), local_parameter(self.bias)
        bias = None if bias is None else bias.float()
        with torch.autocast(x.device.type, enabled=False):
            if _has_bf16_kernel(x) and x.dtype == weight.dtype == torch.bfloat16:
                logits = _LinearToFp32.apply(x, weight)
                return logits if bias is None else logits + bias
            return F.linear(x.float(), weight.float(), bias)


def _has_bf16_kernel(x: Tensor) -> bool:
    """Return True if x's device can multiply bf16 matrices into an fp32 result."""
    return x.is_cuda and torch.version.hip is None


class _LinearToFp32(torch.autograd.Function):
    """x [T, D] @ weight [E, D].T in fp32, for bf16 inputs, without an fp32 copy of x.

    Products of bf16 numbers are exact in fp32, and tensor cores sum them in fp32. The fp32 gradient
    is split into a sum of two bf16 numbers, with a relative error of 2^-15.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _mm_to_fp32(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        # Clear the low bits, because the compiler would drop a cast to bf16 and back.
        high = (grad.view(torch.int32) & -(2**16)).view(torch.float32)
        summands = torch.cat([high, grad - high], dim=1).to(torch.bfloat16)  # [T, 2 * E]
        grad_x = _mm_to_fp32(summands, torch.cat([weight, weight]))
        if not ctx.needs_input_grad[1]:  # the router is frozen
            return grad_x.to(x.dtype), None
        grad_weight = _mm_to_fp32(summands.t(), x).unflatten(0, (2, -1)).sum(dim=0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _mm_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    if _has_bf16_kernel(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class TokenChoiceTopKRouter(nn.Module):
    """Each token chooses its k best experts; experts have no capacity limit, and no token is dropped.

    Group-limited choice as in DeepSeek V3 (arXiv:2412.19437, section 2.1.2). Arguments as in `MoEArgs`.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        num_expert_groups: int | None,
        num_limited_groups: int | None,
        top_k: int,
        score_func: str,
        route_norm: bool,
        route_scale: float,
        gate_bias: bool,
        _debug_force_load_balance: bool = False,
        group_score: str = "top2_sum",
    ):
        super().__init__()
        if score_func not in ("sigmoid", "softmax"):
            raise NotImplementedError(
                f"score_func must be 'sigmoid' or 'softmax', got {score_func!r}"
            )
        num_candidates = num_experts
        if num_expert_groups is not None:
            group_size, rest = divmod(num_experts, max(num_expert_groups, 1))
            least = {"top2_sum": 2, "max": 1}.get(group_score)
            limited = num_limited_groups or 0
            if rest or least is None or group_size < least or not 1 <= limited <= num_expert_groups:
                raise ValueError(
                    f"num_expert_groups = {num_expert_groups} must divide num_experts = {num_experts}, "
                    f"num_limited_groups must be 1 to num_expert_groups, and group_score must be 'max', or "
                    f"'top2_sum' with groups of 2 or more experts; got "
                    f"num_limited_groups = {num_limited_groups}, group_score = {group_score!r}"
                )
            num_candidates = group_size * limited
        if not 1 <= top_k <= num_candidates:
            raise ValueError(
                f"top_k must be between 1 and the {num_candidates} experts a token can choose "
                f"from, got {top_k}"
            )
        self.gate = RouterGate(dim, num_experts, bias=gate_bias)
        self.num_experts, self.top_k = num_experts, top_k
        self.num_expert_groups, self.num_limited_groups = num_expert_groups, num_limited_groups
        self.score_func, self.group_score = score_func, group_score
        self.route_norm, self.route_scale = route_norm, route_scale
        self._debug_force_load_balance = _debug_force_load_balance

    def forward(
        self, x: Tensor, expert_bias: Tensor | None = None, replayed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scores [T, k] fp32, experts [T, k] int64, tokens per expert [E] int64).

        x: [T, D]. expert_bias: [E], added to the scores only for choosing experts.
        replayed: experts [T, k] that replace the router's choice; -1 lets the router choose. The scores,
            and so the router's gradient, always come from this router.
        """
        logits = self.gate(x).float()
        scores = logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(dim=1)
        if self._debug_force_load_balance:
            slots = torch.arange(x.shape[0] * self.top_k, device=x.device)
            selected = slots.view(-1, self.top_k) % self.num_experts
        else:
            choice = scores.detach() if expert_bias is None else scores.detach() + expert_bias
            if self.num_expert_groups is not None:  # the experts of other groups get -inf
                groups = choice.unflatten(1, (self.num_expert_groups, -1))
                num_best = 2 if self.group_score == "top2_sum" else 1
                group_scores = groups.topk(num_best, dim=-1).values.sum(dim=-1)
                best = group_scores.topk(self.num_limited_groups, dim=-1, sorted=False).indices
                excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
                choice = groups.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1)
            selected = choice.topk(self.top_k, dim=1, sorted=False).indices
        if replayed is not None:
            selected = torch.where(replayed < 0, selected, replayed.to(selected.dtype))
        top_scores = scores.gather(1, selected)
        if self.route_norm:
            top_scores = top_scores / (top_scores.sum(dim=1, keepdim=True) + 1e-20)
        return top_scores * self.route_scale, selected, count_tokens(selected, self.num_experts)

    def init_weights(self, init_std: float) -> None:
        init_linear(self.gate, init_std)


def count_tokens(selected_experts: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of each expert on the device: int64 expert ids of any shape -> [E] int64."""
    ids = selected_experts.flatten()
    return ids.new_zeros(num_experts).scatter_add(0, ids, torch.ones_like(ids))


# Arguments of the router that have the same names in `MoEArgs`.
_ROUTER_ARGS = inspect.signature(TokenChoiceTopKRouter).parameters.keys() - {"dim", "num_experts"}


class TokenReorderer(nn.Module):
    """Sorts (token, expert) pairs by expert, or by the group of each pair."""

    def __init__(self, num_experts: int, top_k: int):
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k

    def forward(
        self,
        top_scores: Tensor,
        selected_experts_indices: Tensor,
        *,
        num_groups: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scores [T * k] and pairs [T * k], both sorted by expert, tokens per expert [E]).

        Both inputs are [T, k]; pair j is choice j % k of token j // k. num_groups: the number of groups,
        if selected_experts_indices holds groups instead of experts.
        """
        pairs = selected_experts_indices.flatten().argsort(stable=True)
        counts = count_tokens(selected_experts_indices, num_groups or self.num_experts)
        return top_scores.flatten()[pairs], pairs, counts


# ---- the layer ----


class MoE(nn.Module):
    """Routed experts, by default `GroupedExperts`, plus shared experts that see every token.

    expert_bias [E] fp32 balances the load. Training forwards add their token counts to tokens_per_expert
    [E] fp32, from which the optimizer updates expert_bias before each step.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(
        self, moe_args: MoEArgs, dim: int, hidden_dim: int, experts: nn.Module | None = None
    ):
        super().__init__()
        num_experts = moe_args.num_experts
        if experts is None:
            experts = GroupedExperts(dim, hidden_dim, num_experts, moe_args.use_grouped_mm)
        self.experts = experts
        routing = {name: getattr(moe_args, name) for name in _ROUTER_ARGS}
        self.router = TokenChoiceTopKRouter(dim, num_experts, **routing)
        self.reorderer = TokenReorderer(num_experts, moe_args.top_k)
        self.shared_experts = self.shared_gate = None
        if moe_args.num_shared_experts > 0:
            shared_dim = moe_args.shared_expert_dim or hidden_dim * moe_args.num_shared_experts
            self.shared_experts = FeedForward(dim, shared_dim)
            if moe_args.shared_expert_gate:
                self.shared_gate = Linear(dim, 1, bias=False)
        self.score_before_experts = moe_args.score_before_experts

        self.load_balance_coeff = coeff = moe_args.load_balance_coeff
        if coeff is not None and coeff <= 0:
            raise ValueError(
                f"load_balance_coeff must be positive, or None for no balancing, got {coeff}"
            )
        zeros = torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", None if coeff is None else zeros.clone())
        self.register_buffer("tokens_per_expert", zeros, persistent=False)

    def forward(self, x: Tensor, replayed: Tensor | None = None) -> Tensor:
        """x: [B, S, D]. Returns [B, S, D]. replayed: [B, S, k], see `TokenChoiceTopKRouter`."""
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        if replayed is not None:
            replayed = replayed.reshape(-1, self.router.top_k)
        top_scores, selected, num_tokens_per_expert = self.router(x, self.expert_bias, replayed)
        # Count training tokens only, not validation. Count before the experts: recomputation may stop
        # early, but always reaches this line. The optimizer halves counts that recomputation has doubled.
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert.add_(num_tokens_per_expert)

        groups, num_groups = selected, None
        if (groups_of := getattr(self.experts, "groups", None)) is not None:
            groups, num_groups = groups_of(selected)
        # Under tensor parallelism the reorderer may return only this rank's share of the pairs.
        scores, pairs, num_tokens_per_expert = self.reorderer(
            top_scores, groups, num_groups=num_groups
        )
        if (announce_counts := getattr(self.experts, "announce_counts", None)) is not None:
            announce_counts(num_tokens_per_expert)
        top_k, share = self.router.top_k, pairs.shape[0] != selected.numel()
        places = inverse_rows(pairs, selected.numel())
        routed = take_rows(x, pairs // top_k, places.view(-1, top_k), places_have_gaps=share)
        if self.score_before_experts:
            routed = (routed.float() * scores.unsqueeze(-1)).to(x.dtype)
        # Queue the shared experts first: the device is busy while the host waits for the experts' counts.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        routed = self.experts(routed, num_tokens_per_expert)

        out = take_rows(routed, places, pairs.unsqueeze(1), rows_have_gaps=share)
        out = out.unflatten(0, (-1, top_k))  # [T, k, D]
        if not self.score_before_experts:
            out = out.float() * top_scores.unsqueeze(-1)
        out = out.sum(dim=1).to(x.dtype)
        return (out if shared is None else out + shared).view(shape)

    def init_weights(self, init_std: float, buffer_device: torch.device | None = None) -> None:
        """Fill parameters, and zero the buffers on `buffer_device` (None: where they are)."""
        self.experts.init_weights(init_std)
        self.router.init_weights(init_std)
        if self.shared_experts is not None:
            self.shared_experts.init_weights(init_std)
        if self.shared_gate is not None:
            init_linear(self.shared_gate, PROJECTION_STD)
        device = buffer_device or self.tokens_per_expert.device
        zeros = torch.zeros(self.router.num_experts, dtype=torch.float32, device=device)
        self.tokens_per_expert = zeros
        if self.expert_bias is not None:
            self.expert_bias = zeros.clone()


def build_moe(args: MoEArgs, dim: int, hidden_dim: int, moe_impl: str = "standard") -> MoE:
    """Return the layer. moe_impl: parallelism.expert_parallel_comm_backend, which must be "standard"."""
    if moe_impl != "standard":
        raise ValueError(
            f"parallelism.expert_parallel_comm_backend = {moe_impl!r} is not available; set it "
            "to 'standard'"
        )
    return MoE(args, dim, hidden_dim)
