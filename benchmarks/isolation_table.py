"""What packed documents see of each other, in transformers and here: the table behind docs/documents.md.

    python benchmarks/isolation_table.py [--cases qwen3_5 mistral]

Tiny models with equal weights, fp32, on a CPU. transformers gets rows of packed documents with position
ids that restart at each document, from which it infers the documents. Shown is the largest difference
of logits from those of each document alone, relative to the largest logit, and the share of logits that
change when the tokens of all other documents are exchanged; the last two columns are ours.
"""

import argparse
from collections.abc import Callable

import torch
from common import print_header, print_row
from torch import Tensor

from tests.reference.families import (
    CASES,
    VOCAB,
    hf_model,
    our_model,
    their_logits,
    tokens_and_positions,
)

SHOWN = ["llama", "mistral", "gemma3", "olmo3", "qwen3_5", "qwen3_5_moe", "qwen3_next"]


@torch.no_grad()
def row(case: str) -> list[str]:
    reference = hf_model(case)
    try:
        model, _ = our_model(CASES[case], reference.state_dict())
    except ValueError:
        model = None
    alone = their_logits(reference)

    def theirs(tokens: Tensor, positions: Tensor) -> Tensor:
        # One row at a time: transformers infers documents only in a batch of one row.
        rows = zip(tokens.split(1), positions.split(1), strict=True)
        return torch.cat([reference(t, position_ids=p, use_cache=False).logits for t, p in rows])

    def ours(tokens: Tensor, positions: Tensor) -> Tensor:
        masks = model.get_attention_masks(tokens, None, {"positions": positions})
        return model(tokens, masks, positions)

    cells = [case]
    for logits_of in (theirs, ours):
        if logits_of is ours and model is None:
            cells += ["", ""]
            continue
        tokens, positions = tokens_and_positions()
        difference = (logits_of(tokens, positions) - alone).abs().max() / alone.abs().max()
        cells += [f"{difference:.1e}", f"{foreign_share(logits_of):.0%}"]
    return cells


def foreign_share(logits_of: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the share of the logits that change with the tokens of other documents."""
    tokens, positions = tokens_and_positions()
    documents = (positions == 0).cumsum(1)
    before, changed, number = logits_of(tokens, positions), 0, 0
    for document in range(1, int(documents.max()) + 1):
        own = documents == document
        others = torch.where(own, tokens, 2 + (tokens - 1) % (VOCAB - 2))
        moved = logits_of(others, positions) != before
        changed, number = changed + int(moved[own].sum()), number + moved[own].numel()
    return changed / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=SHOWN)
    print_header("model", "transformers: error", "bits of others", "ours: error", "bits of others")
    for case in parser.parse_args().cases:
        print_row(*row(case))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
