"""Which pairs of features the config's rules refuse."""

from collections import defaultdict

from scripts.composability import refused_pairs

# Rule -> the pairs that it refuses, of the features in scripts/composability.py.
REFUSED = {
    "layout.early_step_with_ddp": {"DDP 2 + early step"},
    "device.device_limits": {
        "CP 2, allgather + fp32",
        "CP 2, ptrr + fp32",
        "PP 2, 1F1B + varlen",
        "PP 2, ZBVZeroBubble + varlen",
        "TP 2 + varlen",
        "TP 2, asynchronous + sdpa",
        "TP 2, asynchronous + varlen",
        "varlen + fp32",
    },
    "layout.tensor_parallel": {"TP 2 + experts, float8", "TP 2, asynchronous + experts, float8"},
    "model.output_in_high_precision": {"TP 2 + float8", "TP 2, asynchronous + float8"},
    "layout.pipeline_schedule": {
        "PP 2, ZBVZeroBubble + compile",
        "PP 2, ZBVZeroBubble + memory budget AC",
        "TP 2, asynchronous + PP 2, ZBVZeroBubble",
    },
    "layout.early_step": {
        "PP 2, 1F1B + early step",
        "PP 2, ZBVZeroBubble + early step",
        "experts, EP 2 + early step",
    },
    "layout.context_parallel": {"CP 2, ptrr + sdpa"},
    "model.attention": {"sdpa + packed documents"},
    "layout.global_batch_size": {"early step + accumulation"},
}


def test_rules_refuse_these_pairs_and_no_others():
    pairs = defaultdict(set)
    for (one, other), (_, rule) in refused_pairs().items():
        pairs[rule].add(f"{one} + {other}")
    assert pairs == REFUSED
