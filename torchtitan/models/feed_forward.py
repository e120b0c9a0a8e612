"""The dense feed-forward of a block, and the initial weights of linear layers."""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.numerics.linear import Linear

PROJECTION_STD = 0.02
# Name in Hugging Face's configs -> activation function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """A gated feed-forward, w2(activation(w1 x) * w3 x); SwiGLU by default (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False, activation: str = "silu"):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.w1 = Linear(dim, hidden_dim, bias=bias)
        self.w2 = Linear(hidden_dim, dim, bias=bias)
        self.w3 = Linear(dim, hidden_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, M]. Returns [B, T, M]."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))

    def init_weights(self, init_std: float) -> None:
        init_linear(self.w1, PROJECTION_STD)
        init_linear(self.w2, init_std)
        init_linear(self.w3, init_std)


def init_linear(linear: nn.Linear, std: float) -> None:
    """Fill the weight with truncated normal numbers, and the bias with zeros."""
    trunc_normal_(linear.weight, mean=0.0, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
