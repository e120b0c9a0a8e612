"""The experts that routers chose for the tokens in a cache.

B rows, T tokens in one call, L mixtures of experts in the model, k experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.decoder import Decoder


class ExpertRecord:
    """Records the experts of a `CachedForward`'s tokens, as a kernel's cache stores their keys.

    stored: int16 [B, max_length, L, k] after the first call; -1 for layers of other pipeline stages
        and for slots without a token.
    """

    def __init__(self, parts: Sequence[Decoder], max_length: int):
        moe_layers = parts[0].moe_layers
        assert moe_layers, "a dense model has no experts to record"
        self._routers = {
            moe_layers.index(int(name)): layer.moe.router
            for part in parts
            for name, layer in part.layers.items()
            if layer.moe_enabled
        }
        self._shape = (max_length, len(moe_layers), parts[0].model_args.moe_args.top_k)
        self.stored: Tensor | None = None

    @contextmanager
    def recording(self, slots: Tensor, n_rows: int) -> Iterator[None]:
        """Record the experts of the tokens at these slots [1 or B, T] while the model runs inside."""
        if self.stored is None:
            self.stored = self._empty(n_rows, slots)
        stored, rows = self.stored, torch.arange(n_rows, device=slots.device)[:, None]

        def record_in(number: int, router: nn.Module) -> Any:
            def record(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
                experts = outputs[1].view(n_rows, slots.shape[1], -1)
                stored[rows, slots, number] = experts.to(stored.dtype)

            return router.register_forward_hook(record)

        with ExitStack() as hooks:
            for number, router in self._routers.items():
                hooks.callback(record_in(number, router).remove)
            yield

    def put_rows(self, places: Tensor, other: "ExpertRecord", rows: Tensor) -> None:
        """As `CachedAttention.put_rows`."""
        assert other.stored is not None
        if self.stored is None:
            self.stored = self._empty(len(places), places)
        self.stored[places, : other.stored.shape[1]] = other.stored[rows]

    def keep_rows(self, rows: Tensor) -> None:
        """As `CachedAttention.keep_rows`."""
        if self.stored is not None:
            self.stored = self.stored[rows]

    def _empty(self, n_rows: int, like: Tensor) -> Tensor:
        return like.new_full((n_rows, *self._shape), -1, dtype=torch.int16)
