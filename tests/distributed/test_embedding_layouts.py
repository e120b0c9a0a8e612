"""Groups and places of ranks, as embedders use them, on gloo ranks."""

import torch.distributed as dist

from tests.distributed.layout_matrix import BY_NAME, batch_flags, config_of
from torchtitan.engine import RankLayout, TrainingEngine
from torchtitan.testing.gloo import run_ranks


def places(folder):
    """Of each layout: place of this rank, the ranks of its group, and what the engine says."""
    result = []
    for name in ("FSDP 2", "TP 2", "PP 2, 1F1B", "PP 2, ZBVZeroBubble"):
        flags = [*BY_NAME[name].overrides(), *batch_flags("llama3", "whole rows")]
        config = config_of("llama3", flags, folder)
        with RankLayout.join(config) as layout:
            ranks = dist.get_process_group_ranks(layout.dp_group)
            place = layout.dp_rank, layout.dp_size, layout.has_outputs, layout.is_output_source
            with TrainingEngine(config, layout=layout) as engine:
                assert (engine.dp_rank, engine.dp_size) == (layout.dp_rank, layout.dp_size)
                assert engine.has_outputs is layout.has_outputs
            result.append((ranks, *place))
    return result


def test_layout_says_where_a_rank_stands_before_there_is_a_model(tmp_path):
    first, second = run_ranks(places, 2, str(tmp_path))
    assert first == [
        ([0, 1], 0, 2, True, True),
        ([0], 0, 1, True, True),
        ([0], 0, 1, False, False),
        ([0], 0, 1, True, True),
    ]
    assert second == [
        ([0, 1], 1, 2, True, True),
        ([1], 0, 1, True, False),
        ([1], 0, 1, True, True),
        ([1], 0, 1, False, False),
    ]
