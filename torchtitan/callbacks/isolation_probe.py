"""A check during training that attention does not cross document boundaries.

The model runs on a batch twice, the second time with one token replaced. The logits of other rows, other
documents, other branches and earlier tokens must be bitwise equal. If documents have branches, the logits of
the next token of each branch must change, unless no token sees another token (for example while the attention's
output projection is 0). A correct model may fail the check under dynamic float8, because a scale depends on a
whole tensor, and with a mixture of experts, because rounding depends on the number of tokens per expert.

B rows, T tokens, V vocabulary entries.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.batch.batch import Batch, TokenBatch
from torchtitan.batch.documents import PADDING, document_starts
from torchtitan.batch.mask import DocumentMask, shards_of
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.distributed.sequence_parallel import WholeSequence
from torchtitan.tools.logging import logger, warn_once


@dataclasses.dataclass
class IsolationProbe:
    """Replaces a token of a batch and finds the logits that change.

    forward: batch -> logits [B, T, V], without gradients, or None on a pipeline rank without the
        last stage. Collective over all ranks.
    models: the model, or this rank's pipeline stages; their blocks are in `layers`.
    seed: seed and step determine which token is replaced.
    pipeline_group: the ranks of one pipeline; None without pipeline parallelism.
    """

    forward: Callable[[TokenBatch], Tensor | None]
    models: Sequence[nn.Module]
    policy: DocumentPolicy
    vocab_size: int
    seed: int
    device: torch.device
    pipeline_group: torch.distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not self.policy.separates_documents:
            logger.info(
                "attention is plain causal, so documents of a row see each other: the isolation probe "
                "checks only that other rows and later tokens are not seen"
            )

    def check(self, step: int, batch: Batch | TokenBatch) -> None:
        """Check this rank's batch with two forward passes; random states stay unchanged.

        Raises RuntimeError on every rank if the check fails on any rank; that rank's message says where.
        """
        batch = self.policy.token_batch(batch)
        if "attention_masks" in batch.entries:
            warn_once(logger, "isolation is not checked, because the batch has its own masks")
            return
        document_ids = batch.document_ids
        if document_ids is None:
            document_ids = torch.zeros(batch.tokens.shape, dtype=torch.int32)
        document_ids = document_ids.cpu()
        depths = None if batch.depths is None else batch.depths.cpu()
        mask = DocumentMask.from_documents(document_ids, depths=depths)
        starts = document_starts(document_ids)
        place = self._choose_token(step, batch.tokens.cpu(), document_ids, starts, depths)
        exchanged = self._exchange(batch, place)
        must_stay = torch.ones(starts.shape, dtype=torch.bool)
        must_move = torch.zeros_like(must_stay)
        if place is not None:
            row, column = (torch.tensor(x) for x in place)
            must_stay[row] = ~mask(row, row, torch.arange(starts.shape[1]), column)
            if depths is not None:  # in every branch, the next token must change
                must_move[row] = ~must_stay[row] & (depths[row] == depths[row, column] + 1)

        before, after = self._run(batch), self._run(exchanged)
        moved, unmoved = torch.zeros_like(must_stay), torch.zeros_like(must_stay)
        if before is not None and after is not None:
            all_moved = _moved(before, after)
            moved, unmoved = all_moved & must_stay, must_move & ~all_moved
        any_moved, any_unmoved = self._on_any_rank(moved, unmoved)
        if any_unmoved:
            if not self._sees_token_before(batch, document_ids, before, place):
                unmoved.zero_()
            any_moved, any_unmoved = self._on_any_rank(moved, unmoved)
        if not (any_moved or any_unmoved):
            return
        before, after = self._layer_outputs(batch), self._layer_outputs(exchanged)
        # Find the first block whose output changed at a position that must stay equal.
        layer = next((x for x in before if (_moved(before[x], after[x]) & must_stay).any()), None)
        if self.pipeline_group is not None:
            found = filter(None, all_ranks(layer, self.pipeline_group))
            layer = min(found, key=lambda x: int(x.removeprefix("layers.")), default=None)
        if not (moved | unmoved).any():
            raise RuntimeError(
                f"documents are not isolated at step {step}: another rank found a leak; see its error"
            )

        def describe(row: int, column: int) -> str:
            document, offset = int(document_ids[row, column]), column - int(starts[row, column])
            where = "padding" if document == PADDING else f"document {document}"
            return f"row {row}, token {column} ({where}, its token {offset})"

        if unmoved.any():
            raise RuntimeError(
                f"a branch does not see its ancestors at step {step}: another token in place of {describe(*place)} "
                f"did not change the logits of {describe(*unmoved.nonzero()[0].tolist())}, a later token of the "
                f"branch; look at the layers' mask (attn_type {self.policy.attn_type!r})"
            )
        first_layer = f"{layer} is the first layer whose output changed"
        if not layer:
            first_layer = "no layer's output changed, so the leak is after the layers"
        layers = [layer for model in self.models for layer in model.layers.children()]
        by_rounding = ""
        if any(getattr(layer, "moe_enabled", False) for layer in layers):
            by_rounding = "With experts, rounding may be the only cause: try other values of debug.seed first. "
        raise RuntimeError(
            f"documents are not isolated at step {step}: with another token in place of {describe(*place)}, "
            f"the logits of {int(moved.sum())} tokens that must not see it changed, first "
            f"{describe(*moved.nonzero()[0].tolist())}; {first_layer}. {by_rounding}Look at the layers' "
            f"mask (attn_type {self.policy.attn_type!r}, attn_mask_type {self.policy.attn_mask_type!r}), "
            "or turn the check off with debug.check_document_isolation_freq = 0"
        )

    def _choose_token(
        self,
        step: int,
        tokens: Tensor,
        document_ids: Tensor,
        starts: Tensor,
        depths: Tensor | None,
    ) -> tuple[int, int] | None:
        """Return (row, column) of the token to replace, or None; equal on all ranks with this batch."""
        usable = document_ids != PADDING
        if self.policy.boundary_token is not None:
            usable &= tokens != self.policy.boundary_token
        # Prefer a token before another document, into which it may leak; else a token with a predecessor.
        # In trees, half of the time prefer a document's last token, which all branches must see.
        has_document_behind = starts < starts[:, -1:]
        has_token_before = torch.arange(tokens.shape[1]).expand(tokens.shape) > 0
        rng = random.Random(f"{self.seed} {step}")
        is_last = torch.zeros_like(usable)
        if depths is not None and rng.random() < 0.5:
            is_last[:, :-1] = (starts[:, 1:] > starts[:, :-1]) & (depths[:, 1:] > 0)
            is_last[:, :-1] &= depths[:, 1:] == depths[:, :-1] + 1
        candidates = (is_last, has_document_behind, has_token_before, usable)
        for wanted in candidates:
            places = (usable & wanted).nonzero()
            if len(places):
                row, column = rng.choice(places.tolist())
                return row, column
        return None

    def _exchange(self, batch: TokenBatch, place: tuple[int, int] | None) -> TokenBatch:
        """Return a copy of the batch with another token at `place`; without a place, the batch itself."""
        if place is None:
            return batch
        tokens = batch.tokens.clone()
        new = (tokens[place] + 1) % self.vocab_size
        is_boundary = new == self.policy.boundary_token
        tokens[place] = (new + 1) % self.vocab_size if is_boundary else new
        return dataclasses.replace(batch, tokens=tokens)

    def _on_any_rank(self, *places: Tensor) -> list[int]:
        """Return for each tensor whether it contains True on any rank. Collective."""
        found = torch.stack([x.any() for x in places]).int()
        if torch.distributed.is_initialized():
            found = found.to(self.device)
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return found.tolist()

    def _sees_token_before(
        self,
        batch: TokenBatch,
        document_ids: Tensor,
        logits: Tensor | None,
        place: tuple[int, int] | None,
    ) -> bool:
        """Return False if replacing a token near `place` leaves the logits of the next token unchanged.

        Both tokens are of one document. logits: the logits of the unchanged batch. Collective.
        """
        continues = document_ids[:, 1:] == document_ids[:, :-1]
        pairs = (continues & (document_ids[:, 1:] != PADDING)).nonzero().tolist()
        row, column = place or (0, 0)
        pairs.sort(key=lambda pair: (pair[0] != row, abs(pair[1] + 1 - column)))
        before = tuple(pairs[0]) if pairs else None
        after = self._run(self._exchange(batch, before))
        if logits is None or after is None or before is None:
            return True
        row, column = before
        return bool(_moved(logits, after)[row, column + 1])

    def _run(self, batch: TokenBatch) -> Tensor | None:
        kept = [self.device] if self.device.type != "cpu" else []
        with torch.random.fork_rng(kept, device_type=self.device.type):
            return self.forward(batch)

    def _layer_outputs(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return block name -> output for whole rows [B, T, n]. Blocks are called with (x, rope, masks)."""
        outputs: dict[str, Tensor] = {}
        seq_len = batch.tokens.shape[1]

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                _, rope, masks = (*args, None, None)[:3]
                if rope is not None:  # tensor-parallel ranks may hold only some of the tokens
                    sequence = getattr(self.models[0], "sequence", WholeSequence())
                    output = sequence.join(output, rope.shape[1])
                if (shards := shards_of(masks)) is not None:
                    output = shards.unshard(output)
                outputs[name] = output.detach()[:, :seq_len].clone()

            return hook

        with ExitStack() as hooks:
            for model in self.models:
                for name, layer in model.layers.named_children():
                    hooks.callback(layer.register_forward_hook(keep(f"layers.{name}")).remove)
            self._run(batch)
        return outputs


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Return bool [B, T] on the CPU, True where two tensors [B, T, n] differ; nan equals nan."""
    rows = zip(before, after, strict=True)  # row by row, because logits are large
    return torch.stack([((a != b) & ~(a.isnan() & b.isnan())).any(dim=-1) for a, b in rows]).cpu()
