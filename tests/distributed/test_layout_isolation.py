"""Documents are isolated to the last bit in every layout: loss and gradients of some documents do not
depend on the others.

Only some documents of a batch have labels. The step is done twice, with other tokens in the other
documents. Loss and gradients must have the same bits, and rows of the embedding that only other
documents use must have a gradient of exactly zero.
"""

import pytest
import torch

from tests.distributed.layout_matrix import (
    BY_NAME,
    ROWS,
    SEQ_LEN,
    SHALLOW,
    VOCAB,
    batch_flags,
    build_engine,
    gradients_of,
    own_rows,
    random_experts,
)
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.testing.gloo import run_ranks

PACKINGS = 3


def packed_rows(seed):
    """Return (positions, whether a token belongs to a document with labels), both [ROWS, SEQ_LEN]."""
    generator = torch.Generator().manual_seed(seed)
    is_start = torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.2
    is_start[:, 0] = True
    columns = torch.arange(SEQ_LEN)
    starts = torch.where(is_start, columns, 0).cummax(dim=1).values
    has_labels = (torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.3).gather(1, starts)
    return columns - starts, has_labels


def step(engine, positions, has_labels, seed):
    """Return the loss and the gradients, by name, of the documents with labels.

    Their tokens are even numbers, and those of other documents odd numbers that depend on `seed`.
    """
    generators = (torch.Generator().manual_seed(n) for n in (0, seed))
    own, other = (
        2 * torch.randint(0, VOCAB // 2, (ROWS, SEQ_LEN), generator=x) for x in generators
    )
    batch = {"input": torch.where(has_labels, own, other + 1), "positions": positions}
    if engine.model_parts[0].moe_layers:  # another load of the experts would round otherwise
        batch["routed_experts"] = random_experts(engine.model_parts[0], 2)
    labels = own.roll(1).where(has_labels, IGNORE_INDEX)
    rows = own_rows(engine)
    engine.optimizers.zero_grad()
    loss = engine.forward_backward_step(
        input_dict={name: x[rows] for name, x in batch.items()},
        labels=labels[rows],
        global_valid_tokens=int(has_labels.sum()),
    )
    return {"loss": loss.detach().cpu(), **gradients_of(engine)}


def foreign_numbers(dump_folder, cases):
    """Return what depends on other documents, for each case; nothing should."""
    found = []
    for layout, family, leaks in cases:
        flags = [*BY_NAME[layout].overrides(), *batch_flags(family, "documents, varlen"), SHALLOW]
        engine = build_engine(family, flags, dump_folder)
        for part in engine.model_parts if leaks else ():
            for block in part.layers.values():
                block.register_forward_hook(lambda m, args, x: x + 1e-3 * x.mean(1, keepdim=True))
        problems = set()
        for seed in range(PACKINGS):
            packing = packed_rows(seed)
            first, again = (step(engine, *packing, n) for n in (1, 2))
            problems |= {name for name, x in first.items() if not torch.equal(x, again[name])}
            if "tok_embeddings.weight" in first:
                embedding = first["tok_embeddings.weight"]
                assert embedding[::2].any()
                problems |= {"embedding of other documents"} if embedding[1::2].any() else set()
        engine.close()
        found.append(sorted(problems))
    return found


# (layout, family, whether its layers leak); one spawn for all layouts of as many ranks
DENSE, EXPERTS = "gates and scales", "qwen3 MoE"
LINEAR, LINEAR_EXPERTS = "qwen3_5", "qwen3_5 MoE"
TWO = ["FSDP 2", "TP 2", "CP 2", "CP 2, alltoall, full AC", "PP 2, 1F1B"]
CASES = {
    2: [
        *((layout, DENSE, False) for layout in TWO),
        ("CP 2", DENSE, True),
        ("FSDP 2, EP 2", EXPERTS, False),
        *((layout, LINEAR, False) for layout in TWO),
        ("FSDP 2, EP 2", LINEAR_EXPERTS, False),
    ],
    4: [("TP 2, CP 2", LINEAR, False), ("FSDP 2, PP 2", LINEAR, False)],
}


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_and_gradients_have_no_bit_of_other_documents(n_ranks, tmp_path):
    how = dict(init_process_group=False, timeout_seconds=600)
    for found in run_ranks(foreign_numbers, n_ranks, str(tmp_path), CASES[n_ranks], **how):
        for case, problems in zip(CASES[n_ranks], found, strict=True):
            *_, leaks = case
            assert bool(problems) == leaks, (case, problems)
