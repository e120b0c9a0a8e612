"""The decoder that all families share: embedding, blocks of attention and feed-forward, norm, and
output or score.

A family is a dataclass of args and a `Decoder` subclass, whose methods define how blocks differ from Llama's.
Checkpoints depend on the names and the order of the modules, so neither may change.

B rows, T tokens, M model dim, H query heads, K key/value heads, D head size, V vocabulary,
L length of the RoPE table.

Initialisation (std; truncated normal unless said otherwise; norms start at one, biases at zero):
    tok_embeddings                        1, normal
    attention.{wq,wk,wv}, feed_forward.w1 0.02
    attention.wo, feed_forward.{w2,w3}    0.02 / sqrt(2 * (layer + 1)); depth_init off: / sqrt(2 * n_layers)
    output                                M ** -0.5, cut at 3 std; also the tied embedding
    score                                 0.02, normal, as in transformers
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.documents import (
    PARENT_IDS,
    boundaries_on_host,
    branch_depths,
    document_ids_from_padding_mask,
    read_document_ids,
)
from torchtitan.batch.mask import DocumentMask, Masks, map_masks, positions_of_rank, shards_of
from torchtitan.config.mask_types import boundary_token, check_kernel, separates_documents
from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.distributed.sequence_parallel import SequenceShards, WholeSequence
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention import AttentionMasksType, attend, build_inner_attention
from torchtitan.models.feed_forward import PROJECTION_STD, FeedForward, init_linear
from torchtitan.models.moe import build_moe
from torchtitan.models.moe.replay import check_replay
from torchtitan.models.norm import build_norm
from torchtitan.models.rope import (
    RoPEScalingArgs,
    YaRNArgs,
    apply_rotary_emb,
    apply_rotary_emb_to_halves,
    precompute_freqs_cis,
    precompute_rope_cache,
    select_positions,
)
from torchtitan.numerics.linear import Linear, project
from torchtitan.protocols.model import ModelProtocol
from torchtitan.tools.host_copy import on_host

if TYPE_CHECKING:
    from torchtitan.data.tokenizer import BaseTokenizer


class Attention(nn.Module):
    """Causal self-attention with H query heads that share K key/value heads.

    qk_norm: (number of heads, D) -> the norm of queries or keys before RoPE; None: no norm. The norm gets
        each head [..., D], or all heads at once [..., heads * D] if it has the attribute `spans_heads`.
    values_from_keys: the values are the keys before their norm and RoPE.
    apply_rope: (xq, xk, table rows) -> (xq, xk); None for a layer without RoPE.
    mask_name: the key of this layer's mask, if the model's masks are a dict.
    softmax_scale: the factor on the scores; None: D ** -0.5.
    window: a query sees itself and the window - 1 tokens before it; used if the mask has no window.
    has_gate: the heads' result is multiplied elementwise by sigmoid(wg(x)), before wo.
    v_norm: the norm of each head [..., D] of values, without parameters; None: no norm.
    """

    v_norm: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        attn_type: str = "sdpa",
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Callable[[int, int], nn.Module] | None = None,
        values_from_keys: bool = False,
        apply_rope: Callable[..., tuple[Tensor, Tensor]] | None = apply_rotary_emb,
        mask_name: str | None = None,
        softmax_scale: float | None = None,
        window: int | None = None,
        has_gate: bool = False,
    ):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.n_rep = self.n_heads // self.n_kv_heads
        self.head_dim = dim // n_heads if head_dim is None else head_dim
        self.enable_gqa = self.n_heads > self.n_kv_heads
        self.attn_type = attn_type
        self.apply_rope = apply_rope
        self.mask_name = mask_name
        self.softmax_scale, self.window = softmax_scale, window

        self.q_norm = qk_norm and qk_norm(self.n_heads, self.head_dim)
        self.k_norm = qk_norm and qk_norm(self.n_kv_heads, self.head_dim)
        self.wq = Linear(dim, self.n_heads * self.head_dim, bias=qkv_bias)
        self.wk = Linear(dim, self.n_kv_heads * self.head_dim, bias=qkv_bias)
        n_values = self.n_kv_heads * self.head_dim
        self.wv = None if values_from_keys else Linear(dim, n_values, bias=qkv_bias)
        self.wg = Linear(dim, self.n_heads * self.head_dim, bias=qkv_bias) if has_gate else None
        self.wo = Linear(self.n_heads * self.head_dim, dim, bias=output_bias)
        self.inner_attention = build_inner_attention(attn_type)

    def forward(self, x: Tensor, rope: Tensor, attention_masks: Masks | None = None) -> Tensor:
        """x: [B, T, M]; rope: the table's rows [1 or B, T, ...]. Returns [B, T, M]."""
        if self.mask_name is not None and isinstance(attention_masks, dict):
            attention_masks = attention_masks[self.mask_name]
        mask = DocumentMask.from_mask(attention_masks)
        part = mask.part
        if part is not None and part.rotate_method == "allgather":
            # Gather keys and values from the other ranks while the queries are computed.
            k, v = self._keys_and_values(x)
            no_heads = k[:, :, :0]
            k = self._rotate(no_heads, k, rope)[1]
            mask = mask.with_part(part.start_gathering(k.transpose(1, 2), v.transpose(1, 2)))
            q = self._rotate(self._heads(self.wq(x), self.q_norm), no_heads, rope)[0]
        else:
            q = self._heads(self.wq(x), self.q_norm)
            k, v = self._keys_and_values(x)
            q, k = self._rotate(q, k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = self.attend(q, k, v, mask).flatten(-2)
        return self.wo(out if self.wg is None else out * self.wg(x).sigmoid())

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.wk(x)
        heads = self._heads(keys, self.k_norm)
        return heads, self._heads(keys if self.wv is None else self.wv(x), self.v_norm)

    def _heads(self, numbers: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Split [B, T, heads * D] into heads [B, T, heads, D], and apply the norm, if any."""
        sizes = (-1, self.head_dim)  # under tensor parallelism a rank holds only some of the heads
        if norm is None:
            return numbers.unflatten(-1, sizes)
        # With autocast on CUDA, torch 2.13 returns the norm in fp32. Cast back, because varlen needs one dtype.
        if getattr(norm, "spans_heads", False):
            return norm(numbers).to(numbers.dtype).unflatten(-1, sizes)
        return norm(numbers.unflatten(-1, sizes)).to(numbers.dtype)

    def _rotate(self, q: Tensor, k: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.apply_rope is None else self.apply_rope(q, k, rope)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask) -> Tensor:
        """q: [B, H, T, D]; k, v: [B, K, T, D]. Returns [B, T, H, D]."""
        return attend(self.inner_attention, q, k, v, mask, self.softmax_scale, self.window)

    def init_weights(self, init_std: float) -> None:
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        for linear in filter(None, (self.wq, self.wk, self.wv, self.wg)):
            init_linear(linear, PROJECTION_STD)
        init_linear(self.wo, init_std)


class TransformerBlock(nn.Module):
    """Residual block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    With `norm_placement` "after" the norms are applied to the results of attention and feed-forward
    instead, with "both" to inputs and results. If the args set `layer_scale`, the block's result is
    multiplied by the buffer `layer_scale` [1].
    Under tensor parallelism x holds this rank's tokens; attention and feed-forward get the tokens of
    all ranks, and return this rank's partial sum of the result.
    """

    sequence: WholeSequence | SequenceShards = WholeSequence()

    def __init__(
        self,
        layer_id: int,
        model_args: DecoderArgs,
        attention: nn.Module,
        feed_forward: nn.Module,
        moe_enabled: bool = False,
    ):
        super().__init__()
        self.layer_id = layer_id
        self.moe_enabled = moe_enabled
        depth = layer_id + 1 if model_args.depth_init else model_args.n_layers
        self.weight_init_std = PROJECTION_STD / (2 * depth) ** 0.5

        self.attention = attention
        if moe_enabled:
            self.moe = feed_forward
        else:
            self.feed_forward = feed_forward
        is_before, is_after = (
            model_args.norm_placement in (place, "both") for place in ("before", "after")
        )
        self.attention_norm = build_norm(model_args) if is_before else None
        self.ffn_norm = build_norm(model_args) if is_before else None
        self.attention_post_norm = build_norm(model_args) if is_after else None
        self.ffn_post_norm = build_norm(model_args) if is_after else None
        self.residual_scale = model_args.residual_scale
        self.register_buffer("layer_scale", torch.ones(1) if model_args.layer_scale else None)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        attention_masks: Masks | None = None,
        routed_experts: Tensor | None = None,
    ) -> Tensor:
        """x: [B, T, M]; rope: the table's rows [1 or B, T, ...]. Returns [B, T, M].

        routed_experts: expert indices [B, T, k] that replace the router's choice in a mixture of experts.
        """
        h = self._input(x, self.attention_norm, rope.shape[1])
        x = self._add(x, self.attention(h, rope, attention_masks), self.attention_post_norm)
        feed_forward = self.moe if self.moe_enabled else self.feed_forward
        h = self._input(x, self.ffn_norm, rope.shape[1])
        out = feed_forward(h) if routed_experts is None else feed_forward(h, routed_experts)
        x = self._add(x, out, self.ffn_post_norm)
        return x if self.layer_scale is None else x * self.layer_scale.to(x.dtype)

    def _input(self, x: Tensor, norm: nn.Module | None, seq_len: int) -> Tensor:
        return self.sequence.gather(x if norm is None else norm(x), seq_len)

    def _add(self, x: Tensor, summand: Tensor, norm: nn.Module | None) -> Tensor:
        out = self.sequence.reduce(summand)
        out = out if norm is None else norm(out)
        return x + (out if self.residual_scale == 1 else out * self.residual_scale)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for name, module in self.named_children():
            if name.endswith("_norm"):
                module.reset_parameters()
        if self.layer_scale is not None:
            self.layer_scale = torch.ones(1, device=buffer_device or self.layer_scale.device)
        self.attention.init_weights(self.weight_init_std)
        if self.moe_enabled:
            self.moe.init_weights(self.weight_init_std, buffer_device)
        else:
            self.feed_forward.init_weights(self.weight_init_std)


class OutputProjection(Linear):
    """Hidden states [B, T, M] -> logits [B, T, V], or the result of a head. This module calls the head,
    because FSDP gathers the weight for this module's forward.

    in_fp32: compute with fp32 copies of weight and hidden states. cap: c, for logits c * tanh(logits / c);
        a head gets c as the keyword argument `cap`.
    """

    in_fp32: bool = False
    cap: float | None = None
    reads_local_parameters = True  # tensor parallelism changes the class to VocabularyOutput

    def forward(self, h: Tensor, head: Callable[..., Any] | None = None) -> Any:
        low_rank = None if self.low_rank is None else functools.partial(self.low_rank, self)
        how = {"product": self.product, "in_fp32": self.in_fp32, "low_rank": low_rank}
        return project(head, h, self.weight, self.bias, cap=self.cap, **how)


class ValueHead(nn.Linear):
    """Hidden states [B, T, M] -> values [B, T, 1], in fp32 because bf16 has only 2 or 3 digits."""

    reads_local_parameters = True

    def __init__(self, dim: int):
        super().__init__(dim, 1)

    def forward(self, h: Tensor) -> Tensor:
        weight, bias = local_parameter(self.weight), local_parameter(self.bias)
        with torch.autocast(h.device.type, enabled=False):
            # Add the bias separately: F.linear with a bias returns a view, and FSDP warns of views.
            return F.linear(h.float(), weight.float()) + bias.float()


class Decoder(ModelProtocol):
    """A decoder-only transformer.

    rope_buffer_name: name of the RoPE table's buffer. It also decides which dimensions of a head RoPE rotates
        together: with "rope_cache" i and i + D/2, with "freqs_cis" neighbours.

    The norm is followed by `output`, or by `score` if the args set `value_head`; the unused
    attribute is None. A pipeline stage sets the modules it does not hold to None and drops the
    layers of other stages. Raises ValueError for a mask type that the kernel cannot apply.
    """

    rope_buffer_name: ClassVar[str] = "freqs_cis"
    sequence: WholeSequence | SequenceShards = WholeSequence()

    def __init__(self, model_args: DecoderArgs):
        super().__init__(model_args)
        check_kernel(model_args.attn_type, model_args.attn_mask_type)
        self.model_args = model_args
        self.vocab_size = model_args.vocab_size
        self.n_layers = model_args.n_layers
        self.max_seq_len = model_args.max_seq_len
        self.enable_weight_tying = model_args.enable_weight_tying

        # `from_pretrained` samples no weights; sampling on the meta device would load torch's compiler.
        self.tok_embeddings = nn.Embedding.from_pretrained(
            torch.empty(model_args.vocab_size, model_args.dim), freeze=False
        )
        # Not saved: the table is computed from the args, and a later run may need another length.
        self.register_buffer(self.rope_buffer_name, self._new_rope_table(), persistent=False)
        self.layers = nn.ModuleDict()
        for i in range(model_args.n_layers):
            parts = self.build_attention(i), self.build_feed_forward(i), self.is_moe_layer(i)
            self.layers[str(i)] = TransformerBlock(i, model_args, *parts)
        self.norm = build_norm(model_args)
        self.output = self.score = None
        if model_args.value_head:
            self.score = ValueHead(model_args.dim)
        else:
            self.output = OutputProjection(model_args.dim, model_args.vocab_size, bias=False)
            self.output.in_fp32, self.output.cap = model_args.fp32_head, model_args.logits_cap
        self._tie_weights()

    # ---- methods that model families override ----

    def attention_options(self, layer_id: int) -> dict[str, Any]:
        """Return the keyword arguments of a block's `Attention`, except sizes, kernel and RoPE."""
        return {}

    def hidden_dim(self, layer_id: int) -> int:
        """Return the hidden size of a block's feed-forward, or of each of its experts."""
        args = self.model_args
        return args.moe_inter_dim if self.is_moe_layer(layer_id) else args.hidden_dim

    def is_moe_layer(self, layer_id: int) -> bool:
        """Return True if a block has a mixture of experts."""
        return False

    @property
    def rope_scaling(self) -> RoPEScalingArgs | YaRNArgs | None:
        """How RoPE's frequencies are stretched to longer contexts; None: not at all."""
        return None

    def build_attention(self, layer_id: int) -> nn.Module:
        """Return a block's attention module, with the arguments and result of `Attention.forward`."""
        args, by_halves = self.model_args, self.rope_buffer_name == "rope_cache"
        return Attention(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.attention_head_dim,
            attn_type=args.attn_type,
            apply_rope=apply_rotary_emb_to_halves if by_halves else apply_rotary_emb,
            **self.attention_options(layer_id),
        )

    def build_feed_forward(self, layer_id: int) -> nn.Module:
        """Return a block's feed-forward or mixture of experts."""
        args, hidden_dim = self.model_args, self.hidden_dim(layer_id)
        if self.is_moe_layer(layer_id):
            backend = getattr(args, "expert_parallel_comm_backend", "standard")
            return build_moe(args.moe_args, args.dim, hidden_dim, moe_impl=backend)
        bias = getattr(args, "mlp_bias", False)
        return FeedForward(args.dim, hidden_dim, bias, args.hidden_act)

    def build_rope_table(self, length: int) -> Tensor:
        """Return the RoPE table [length, ...] on torch's default device. Attention gets one row per token."""
        args, by_halves = self.model_args, self.rope_buffer_name == "rope_cache"
        build = precompute_rope_cache if by_halves else precompute_freqs_cis
        return build(args.attention_head_dim, length, args.rope_theta, self.rope_scaling)

    def check_rows(self, attention_masks: Any, row_len: int) -> None:
        """Raise ValueError for rows that the model cannot take. row_len: tokens of a row, over all cp ranks."""

    # ---- the same for all families ----

    def forward(
        self,
        tokens: Tensor,
        attention_masks: AttentionMasksType | Masks | Tensor | None = None,
        positions: Tensor | None = None,
        head: Callable[..., Any] | None = None,
        routed_experts: Tensor | None = None,
    ) -> Any:
        """Return logits [B, T, V], or with a value head values [B, T, 1], for token ids [B, T].

        attention_masks: the result of `get_attention_masks`, the caller's own mask, a `DocumentMask`, or
            a padding mask [B, T] as in `get_padding_masks`; None for sdpa.
        positions: [1, T] or [B, T] int, the place of each token in its document, for RoPE only; None
            means 0..T-1. Under context parallelism positions of whole rows are also accepted.
        head: called as head(h [B, T, M], weight, bias, group=...) in place of the output
            projection; its result is returned. `loss.logprobs` has heads. Under tensor parallelism
            weight is this rank's shard [V/tp, M], and group is the process group of all shards.
        routed_experts: [B, T, L, k] as in `check_routed_experts`; forward does not check them.
        A pipeline stage after the first takes hidden states [B, T, M] as `tokens`, and a stage before
        the last returns them. With a parallel loss, logits are a DTensor split along V.
        """
        sequence, seq_len = self.sequence, tokens.shape[1]
        if isinstance(attention_masks, Tensor) and attention_masks.ndim == 2:
            masks = self.get_padding_masks(attention_masks)
        else:
            attn_type = self.model_args.attn_type
            masks = map_masks(lambda x: DocumentMask.from_mask(x).lower(attn_type), attention_masks)
        shards = shards_of(masks)
        row_len = seq_len if shards is None else shards.cp * seq_len
        self.check_rows(attention_masks, row_len)
        positions = positions_of_rank(masks, positions, seq_len)
        if self.tok_embeddings is not None:
            h = self.tok_embeddings(tokens)
            if (scale := self.model_args.embedding_scale) != 1:
                # Gemma rounds the factor to the dtype of the hidden states.
                h = h * torch.tensor(scale, dtype=h.dtype, device="cpu").item()
            h = sequence.reduce(h)
        else:
            h = sequence.split(tokens)
        # All layers use the same rows of the table, so look them up once.
        rope = select_positions(self._rope_table(positions, row_len), positions, seq_len)
        for layer_id, layer in self.layers.items():
            experts = self._routed_experts_of(int(layer_id), routed_experts)
            h = layer(h, rope, masks) if experts is None else layer(h, rope, masks, experts)
        h = self.norm(h) if self.norm is not None else h
        if self.score is not None:
            if head is not None:
                raise ValueError(
                    "the argument head needs an output projection, and a model with a value head has "
                    "none; call the model without head, which returns values [B, T, 1]"
                )
            # Under tensor parallelism each rank scores its own tokens. `join` returns a view, so clone:
            # a loss that changes a view in place would remove FSDP's hooks.
            return sequence.join(self.score(h), seq_len).clone()
        if self.output is None:
            return sequence.join(h, seq_len)
        h = sequence.gather(h, seq_len)
        if (divisor := self.model_args.logits_divisor) != 1:
            # Divide h instead of the logits: a head never stores all logits.
            h = h / divisor
        return self.output(h) if head is None else self.output(h, head)

    @functools.cached_property
    def moe_layers(self) -> list[int]:
        """The indices of all blocks with a mixture of experts, also on other pipeline stages."""
        return [i for i in range(self.n_layers) if self.is_moe_layer(i)]

    def check_routed_experts(self, tokens: Tensor, routed_experts: Tensor) -> None:
        """Raise ValueError if this model's routers cannot use `routed_experts` for `tokens` [B, T].

        routed_experts: the indices [B, T, L, k] of each token's k experts, or -1 in all k places to let the
            router choose. L is the number of MoE layers or the number of all layers. Indices on an
            accelerator are not checked.
        """
        n_moe = len(self.moe_layers)
        check_replay(
            tokens, routed_experts, n_moe, self.n_layers, n_moe and self.model_args.moe_args
        )

    def _routed_experts_of(self, layer_id: int, routed_experts: Tensor | None) -> Tensor | None:
        """Return a layer's part [B, T, k] of routed_experts [B, T, L, k]; None for a dense layer."""
        if routed_experts is None or not self.is_moe_layer(layer_id):
            return None
        is_per_layer = routed_experts.shape[2] == self.n_layers
        slot = layer_id if is_per_layer else self.moe_layers.index(layer_id)
        return routed_experts[:, :, slot]

    def _new_rope_table(self) -> Tensor:
        """Return the RoPE table for max_seq_len. On the meta device only its shape is computed, because
        arange would load torch's compiler there."""
        length = self.model_args.max_seq_len
        if torch.get_default_device().type != "meta":
            return self.build_rope_table(length)
        with torch.device("cpu"):
            row = self.build_rope_table(1)
        return row.new_empty((length, *row.shape[1:]), device="meta")

    def _rope_table(self, positions: Tensor | None, row_len: int) -> Tensor:
        """Return the RoPE table; replace it by a longer table if positions go beyond its end.

        row_len: tokens of a row, over all cp ranks. Positions on an accelerator are read, which waits for the
        device, only if rows are longer than the table.
        """
        table = getattr(self, self.rope_buffer_name)
        length = row_len
        if positions is not None:
            may_wait = table.device.type == "cpu" or row_len > len(table)
            if not may_wait or torch.compiler.is_compiling() or not positions.numel():
                return table
            length = int(on_host(positions).max()) + 1
        if length > len(table):
            with torch.device(table.device), torch.inference_mode(False):
                table = self.build_rope_table(length)
            setattr(self, self.rope_buffer_name, table)
        return table

    def get_attention_masks(
        self,
        input_batch: Tensor,
        tokenizer: "BaseTokenizer | None",
        extra_inputs: dict[str, Any] | None = None,
    ) -> AttentionMasksType:
        """Return `document_masks` in the kernel's own form, as torchtitan 0.2.x's method does.

        input_batch: token ids [B, T]. extra_inputs: the batch's other entries. Explicit boundaries
        (`document_ids`, `seq_lens`, `cu_seqlens`) override the boundaries that the mask type would
        read. `parent_ids` make the documents branches of trees.
        """
        args = self.model_args
        if args.attn_type == "sdpa":
            raise TypeError("attn_type 'sdpa' takes no attention masks; use 'flex' or 'varlen'")
        document_ids = depths = None
        if separates_documents(args.attn_mask_type):
            batch = boundaries_on_host({"input": input_batch, **(extra_inputs or {})})
            token = boundary_token(tokenizer, args.attn_mask_type)
            document_ids = read_document_ids(batch, args.attn_mask_type, token)
            if batch.get(PARENT_IDS) is not None:
                depths = branch_depths(document_ids, batch[PARENT_IDS])
        masks = self.document_masks(input_batch, document_ids, depths)
        return map_masks(lambda mask: mask.lowered, masks)

    @property
    def makes_document_masks(self) -> bool:
        """True unless a subclass overrides `get_attention_masks`; the override then replaces `document_masks`."""
        return type(self).get_attention_masks is Decoder.get_attention_masks

    def document_masks(
        self, tokens: Tensor, document_ids: Tensor | None, depths: Tensor | None = None
    ) -> Masks:
        """Return the layers' mask for tokens [B, T], with the kernel's form in `lowered`.

        document_ids: [B, T], on the device or the host; None: each row is one document.
        depths: the result of `branch_depths`, if documents are branches of trees.
        """
        if document_ids is not None:
            documents = DocumentMask.from_documents(document_ids, tokens.device, depths)
            return self._lowered_masks(documents)
        if self.model_args.attn_type == "varlen":
            raise ValueError(
                "attn_type 'varlen' needs document boundaries, got attn_mask_type 'causal'; "
                "set model.attn_mask_type to 'block_causal' or 'position_block_causal'"
            )
        return self._lowered_masks(DocumentMask.from_rows(*tokens.shape, tokens.device))

    def get_padding_masks(self, padding_mask: Tensor) -> Masks:
        """Return masks for rows that each hold one document and padding; `attn_mask_type` is ignored.

        padding_mask: [B, T], zero at padding tokens, each of which attends only to itself. Raises
        ValueError for padding between tokens.
        """
        document_ids = document_ids_from_padding_mask(on_host(padding_mask))
        return self.document_masks(padding_mask, document_ids)

    def layer_masks(self, documents: DocumentMask) -> Masks:
        """Return the DocumentMask of all layers, or a dict: `Attention.mask_name` -> DocumentMask."""
        return documents

    def _lowered_masks(self, documents: DocumentMask) -> Masks:
        attn_type = self.model_args.attn_type
        if attn_type == "varlen":
            # Lower before `layer_masks`, so that all masks together wait for the device at most once.
            documents = documents.lower(attn_type)
        # Cached, so that layers with the same mask share its lowered form.
        lower = functools.cache(lambda mask: mask.lower(attn_type))
        return map_masks(lower, self.layer_masks(documents))

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill parameters and the RoPE table in place, as the module's docstring lists."""
        buffer = getattr(self, self.rope_buffer_name)
        with torch.device(buffer_device or buffer.device):
            setattr(self, self.rope_buffer_name, self._new_rope_table())
        # `to_empty` has untied the embedding and the output: each has its own tensor now.
        self._tie_weights()
        embedding, output = self.tok_embeddings, self.output
        if self.enable_weight_tying:
            # Below, a tied weight is filled as the embedding and then as the output. A pipeline stage with
            # only one of the two modules does both, so that all copies of the weight are equal.
            embedding = output = embedding or output
        if embedding is not None:
            nn.init.normal_(embedding.weight)
        for layer in self.layers.values():
            layer.init_weights(buffer_device)
        if self.norm is not None:
            self.norm.reset_parameters()
        if output is not None:
            std = self.model_args.dim**-0.5
            trunc_normal_(output.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
        if self.score is not None:
            nn.init.normal_(self.score.weight, std=PROJECTION_STD)
            nn.init.zeros_(self.score.bias)

    def _tie_weights(self) -> None:
        # Two pipeline stages each have a copy: see `distributed.tied_copies`.
        has_both = self.tok_embeddings is not None and self.output is not None
        if self.enable_weight_tying and has_both:
            self.output.weight = self.tok_embeddings.weight
