"""Branches of trees see their ancestors and nothing else: the certificate, leaks that it has to find, and
whole decoders, whose logits and gradients have to be those of each branch in a row of its own.

B rows, T tokens, V vocabulary entries.
"""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from tests.isolation.test_isolation import with_large_weights
from torchtitan.batch import mask as mask_module
from torchtitan.batch.documents import IGNORE_INDEX, branch_depths, follow_branches, ids_of_branches
from torchtitan.batch.mask import DocumentMask
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.batch.trees import tree_batch
from torchtitan.distributed.context_parallel import needed_keys
from torchtitan.models import llama4
from torchtitan.models.causal_lm import CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.testing import isolation

VOCAB_SIZE, SEQ_LEN = 32, 40


def first_problem(n_batches):
    return next(filter(None, (isolation.check_trees(i)[0] for i in range(n_batches))), None)


def random_trees(rng, seq_len):
    """Return ids and parents [2, seq_len], and the branches of both rows."""
    ids, parents, branches = zip(
        *(isolation.random_tree_row(rng, row, seq_len) for row in range(2)), strict=True
    )
    return torch.tensor(ids), torch.tensor(parents), sum(branches, [])


@pytest.mark.parametrize("n_batches", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_rows_of_trees_have_the_outputs_and_gradients_of_each_branch_alone(n_batches):
    assert first_problem(n_batches) is None


# ---- leaks between branches ----


def changed_tables(change):
    """`follow_branches` with one of its results changed: change(ends, begins, paths, depths)."""

    def changed(depths):
        ends, begins, paths = follow_branches(depths)
        return change(ends.clone(), begins.clone(), paths.clone(), depths)

    return mask_module, "follow_branches", changed


def ends_of_parents(ends, begins, paths, depths):
    """A segment is seen by its siblings."""
    before = paths[(begins + depths - 1).clamp(min=0)].long()
    return torch.where(depths > 0, ends.gather(1, before), ends), begins, paths


def without_first_ancestor(ends, begins, paths, depths):
    is_first = torch.cat((torch.tensor([True]), paths[1:] <= paths[:-1]))
    paths[1:] = torch.where(is_first[:-1], paths[:-1], paths[1:])
    return ends, begins, paths


def a_token_early(ids, parents):
    depths = branch_depths(ids, parents)
    return depths if depths is None else torch.where(depths > 0, depths - 1, depths)


def grandparents(ids, parents):
    """The last branch of a row continues its grandparent."""
    found = parents.clone()
    for row, own, theirs in zip(found, ids, parents, strict=True):
        if theirs[-1] >= 0:
            row[own == own[-1]] = theirs[own == theirs[-1]][0]
    return branch_depths(ids, found)


def wrapped(kernel):
    """A kernel made of varlen's, kernel(attend, q, k, v, ids, depths)."""
    varlen = isolation.KERNELS["varlen"]

    def broken(q, k, v, ids, depths=None):
        return varlen(q, k, v, ids) if depths is None else kernel(varlen, q, k, v, ids, depths)

    return isolation, "TREE_KERNELS", {"broken": broken}


def keys_of_other_branches(attend, q, k, v, ids, depths):
    """The right output; the gradient of keys is that of plain causal attention."""
    causal = DocumentMask.from_rows(*ids.shape, ids.device)
    leaky = isolation.attend(
        isolation.build_inner_attention("flex"), q.detach(), k, v.detach(), causal
    )
    return attend(q, k.detach(), v, ids, depths) + leaky - leaky.detach()


def no_gradient_to_ancestors(attend, q, k, v, ids, depths):
    def detached(x):
        is_leaf = (follow_branches(depths)[0].diff(dim=1) == 0).all()
        return x if is_leaf else x.detach()

    shared = DocumentMask.from_documents(ids)
    own = isolation.attend(isolation.build_inner_attention("varlen"), q, k, v, shared)
    out = attend(q.detach(), detached(k), detached(v), ids, depths)
    return out + own - own.detach()


FIRST_BATCHES = {}


def mask_of_the_first_batch(attend, q, k, v, ids, depths):
    return attend(q, k, v, *FIRST_BATCHES.setdefault(ids.shape, (ids, depths)))


def keys_of_the_next_branch(*arguments):
    keys = needed_keys(*arguments)
    return keys._replace(index=keys.index.roll(1))


def without_full_blocks(self, block_size=128):
    """The mask function is right, but blocks that are seen in full are not listed."""
    right = block_mask(self, block_size)
    lists = right.kv_num_blocks, right.kv_indices
    sizes = {"BLOCK_SIZE": block_size, "seq_lengths": (self.starts.shape[1],) * 2}
    return type(right).from_kv_blocks(*lists, mask_mod=self, **sizes)


block_mask, mask_call = DocumentMask.block_mask, DocumentMask.__call__


def without_branches(self, b, h, q, kv):
    if self.depths is None:
        return mask_call(self, b, h, q, kv)
    return (q >= kv) & (kv >= self.starts[b, q])


LEAKS = {
    "ends a token early": changed_tables(
        lambda ends, b, p, d: (torch.maximum(ends - 1, torch.arange(ends.shape[1])), b, p)
    ),
    "seen by siblings": changed_tables(ends_of_parents),
    "an ancestor twice": changed_tables(without_first_ancestor),
    "parents ignored": (isolation, "branch_depths", lambda ids, parents: None),
    "branches a token early": (isolation, "branch_depths", a_token_early),
    "grandparents": (isolation, "branch_depths", grandparents),
    "gradient to siblings' keys": wrapped(keys_of_other_branches),
    "no gradient to ancestors": wrapped(no_gradient_to_ancestors),
    "mask of an earlier batch": wrapped(mask_of_the_first_batch),
    "keys of the next branch": (mask_module, "needed_keys", keys_of_the_next_branch),
    "blocks left out that are seen in full": (DocumentMask, "block_mask", without_full_blocks),
    "mask function that forgets branches": (DocumentMask, "__call__", without_branches),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_certificate_finds_a_leak_between_branches(leak, monkeypatch):
    monkeypatch.setattr(*LEAKS[leak])
    assert first_problem(30)


def blocks_in(numbers, indices):
    listed = torch.zeros(len(numbers), *[numbers.shape[2]] * 2, dtype=torch.bool)
    for row, query in itertools.product(*map(range, listed.shape[:2])):
        listed[row, query, indices[row, 0, query, : numbers[row, 0, query]].long()] = True
    return listed


def test_blocks_are_listed_as_what_the_mask_function_says_of_their_pairs():
    rng = random.Random(0)
    n_full = 0
    for i in range(60):
        seq_len = rng.randint(9, 64)
        ids, parents, _ = random_trees(rng, seq_len)
        mask = DocumentMask.from_documents(ids, depths=branch_depths(ids, parents))
        masks = mask, mask.with_window(5), mask.in_chunks(6), mask.in_chunks(7).with_window(3)
        mask = masks[i % 4]
        pairs = mask.lower("sdpa").lowered[:, 0]
        block_mask = mask.block_mask(block_size=4)
        n_blocks = -(-seq_len // 4)
        padded = torch.zeros(2, 4 * n_blocks, 4 * n_blocks, dtype=torch.bool)
        padded[:, :seq_len, :seq_len] = pairs
        blocks = padded.unflatten(1, (n_blocks, 4)).unflatten(3, (n_blocks, 4)).transpose(2, 3)
        listed = blocks_in(block_mask.kv_num_blocks, block_mask.kv_indices)
        full = blocks_in(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        assert not (listed & full).any()
        assert (blocks.any(-1).any(-1) <= listed | full).all(), "a visible pair is not listed"
        assert (full <= blocks.all(-1).all(-1)).all(), "a block in full has a hidden pair"
        n_full += int(full.sum())
    assert n_full > 30


# ---- what a batch says ----


def test_positions_go_on_along_branches_and_ids_can_be_read_back():
    ids = torch.tensor([[7, 7, 3, 5, 5, 1, 5, -1, 2]])
    parents = torch.tensor([[-1, -1, 7, 7, 7, 5, 7, -1, -1]])
    depths = branch_depths(ids, parents)
    assert depths.tolist() == [[0, 1, 2, 2, 3, 4, 2, -1, 0]]
    assert torch.equal(branch_depths(*ids_of_branches(depths)), depths)
    assert branch_depths(ids, torch.full_like(ids, -1)) is None


POLICY = DocumentPolicy("flex", "position_block_causal", None, True, True)
TREE = {
    "input": torch.arange(6)[None],
    "document_ids": torch.tensor([[0, 0, 1, 1, 2, 3]]),
    "parent_ids": torch.tensor([[-1, -1, 0, 0, 0, 2]]),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent_ids": torch.tensor([[-1, -1, 0, 0, 0, 1]])}, "document 3 at token 5 of row 0 has parent 1"),
        ({"parent_ids": torch.tensor([[-1, -1, 0, -1, 0, 2]])}, "must have one parent"),
        ({"parent_ids": torch.tensor([[-1, -1, 9, 9, 0, 2]])}, "has parent 9"),
        ({"document_ids": torch.tensor([[0, -1, 1, 1, 2, 3]])}, "without padding between"),
        ({"parent_ids": torch.tensor([[-1, -1, 0]])}, "must have the shape of its 'input'"),
        ({"document_ids": None}, "must have 'document_ids'"),
        ({"positions": torch.tensor([[0, 1, 2, 3, 4, 5]])}, "4 instead of 2 at token 4 of row 0"),
    ],
)  # fmt: skip
def test_trees_that_make_no_sense_are_refused_with_the_token(changes, message):
    batch = {key: x for key, x in (TREE | changes).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        POLICY.token_batch(batch)


def test_linear_attention_refuses_trees_by_name():
    kinds = {"full": LayerKind(), "linear": LayerKind(None, mixer="gated_delta")}
    sizes = dict(dim=32, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, vocab_size=VOCAB_SIZE)
    sizes |= dict(linear_key_heads=2, linear_value_heads=2, linear_key_dim=8, linear_value_dim=8)
    attention = dict(attn_type="flex", attn_mask_type="position_block_causal")
    args = CausalLMArgs(**sizes, **attention, layer_kinds=kinds, layer_types=("full", "linear"))
    model, batch = CausalLM(args), POLICY.token_batch(TREE)
    with pytest.raises(ValueError, match="linear attention has one state per document"):
        model.document_masks(batch.tokens, batch.document_ids, batch.depths)
    mask = DocumentMask.from_documents(batch.document_ids, depths=batch.depths).lower("flex")
    with pytest.raises(ValueError, match="a mask of trees"):
        model.check_rows(mask.lowered, 6)


def test_trees_need_a_mask_type_that_separates_documents_and_no_masks():
    causal = DocumentPolicy("sdpa", "causal", None, True, True)
    for policy, batch in ((causal, TREE), (POLICY, TREE | {"attention_masks": None})):
        with pytest.raises(ValueError, match="'parent_ids' must have 'document_ids' and no"):
            policy.token_batch(batch)


def test_a_parents_last_label_stays_and_pairs_are_counted_along_branches():
    batch = POLICY.training_batch(TREE, torch.tensor([[1, 2, 3, 9, 5, 0]]))
    assert batch.labels.tolist() == [[1, 2, 3, IGNORE_INDEX, 5, 0]]
    assert POLICY.attended_pairs(batch) == 1 + 3 + 5 + 7 + 5 + 7


# ---- the helper ----


def test_sequences_share_prompts_and_turns_and_every_scored_label_is_counted_once():
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5, 6], [9], [1, 2, 3]]
    continuations = [[4, 5], [4, 7, 7], [8, 8], [1, 2], [4, 5]]
    trees = tree_batch(prompts, continuations, seq_len=16)
    labels = trees.of_sequences(trees.batch["labels"])
    positions = trees.of_sequences(trees.batch["positions"])
    for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        own = trees.of_sequences(trees.batch["input"])[i].tolist()
        assert own == [*prompt, *continuation][:-1]
        assert labels[i].tolist()[len(prompt) - 1 :] == continuation
        assert positions[i].tolist() == list(range(len(own)))
    scored = (trees.batch["labels"] != IGNORE_INDEX).sum()
    assert scored == sum(map(len, continuations))
    # 1 2 | 3 4 | 3 4 (its fifth token is scored in the third sequence's own branch), ...
    assert (trees.batch["positions"] >= 0).sum() < sum(len(x) for x in positions)
    assert trees.batch["input"].shape[1] <= 16
    with pytest.raises(ValueError, match="got 3 and 0 for sequence 0"):
        tree_batch([[1, 2, 3]], [[]], 8)
    with pytest.raises(ValueError, match="at most seq_len \\+ 1 = 3 tokens"):
        tree_batch([[1, 2, 3]], [[4]], 2)


def test_group_that_does_not_fit_a_row_becomes_several_trees():
    prompts, continuations = [[5] * 10] * 6, [[i] * 4 for i in range(6)]
    trees = tree_batch(prompts, continuations, seq_len=20)
    assert trees.batch["input"].shape == (3, 17)
    for i, own in enumerate(trees.of_sequences(trees.batch["input"])):
        assert own.tolist() == prompts[i] + continuations[i][:-1]


# ---- whole decoders ----


def build_decoder(kind, attn_type):
    sizes = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE)
    sizes |= dict(max_seq_len=64, attn_type=attn_type, attn_mask_type="position_block_causal")
    moe = MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, use_grouped_mm=False)
    experts = sizes | dict(moe_inter_dim=16, moe_args=moe)
    if kind == "llama3":
        decoder = Transformer(TransformerModelArgs(multiple_of=16, **sizes))
    elif kind == "llama4":  # layers of chunks of 8 tokens, and one without
        chunks = dict(fixed_attn_block_size=8, every_n_layers_nope=2, hidden_dim=64)
        decoder = llama4.Transformer(llama4.TransformerModelArgs(**experts, **chunks))
    else:
        decoder = GptOssModel(GptOssModelArgs(head_dim=8, sliding_window_size=6, **experts))
    return with_large_weights(decoder).double()


def logits_and_gradients(decoder, tokens, entries, positions, cotangent):
    masks = decoder.get_attention_masks(tokens, SimpleNamespace(eos_id=0), entries)
    logits = decoder(tokens, attention_masks=masks, positions=positions)
    gradients = torch.autograd.grad(
        logits, list(decoder.parameters()), cotangent, allow_unused=True, materialize_grads=True
    )
    return [logits.detach(), *gradients]


@pytest.mark.parametrize("kind", ["llama3", "llama4", "gpt_oss"])
def test_decoder_gives_logits_and_gradients_of_branches_in_rows_of_their_own(kind, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # RoPE, routers and sinks
    ids, parents, branches = random_trees(random.Random(3), SEQ_LEN)
    positions = branch_depths(ids, parents).clamp(min=0).long()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCAB_SIZE, ids.shape, generator=generator)
    cotangent = torch.randn(*ids.shape, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    entries = {"document_ids": ids, "parent_ids": parents}
    flex, varlen = (build_decoder(kind, attn_type) for attn_type in ("flex", "varlen"))
    logits, expected = torch.zeros_like(cotangent), [torch.zeros_like(p) for p in flex.parameters()]
    for row, columns, n_before in branches:
        own = cotangent[row, columns][None].clone()
        own[:, :n_before] = 0
        along = torch.arange(len(columns))[None]
        alone, *of_branch = logits_and_gradients(
            varlen, tokens[row, columns][None], {"positions": along}, along, own
        )
        logits[row, columns[n_before:]] = alone[0, n_before:]
        expected = [x + y for x, y in zip(expected, of_branch, strict=True)]
    for decoder in (flex, varlen):
        found = logits_and_gradients(decoder, tokens, entries, positions, cotangent)
        for ours, theirs in zip(found, [logits, *expected], strict=True):
            assert (ours - theirs).abs().max() <= 1e-13 * max(1, theirs.abs().max())
