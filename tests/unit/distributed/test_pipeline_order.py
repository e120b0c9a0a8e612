"""The order of a pipeline's actions and messages, played with ranks that wait for each other."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from torchtitan.distributed.pipeline_order import (
    Action,
    compute_order,
    rank_of_stages,
    select,
    with_messages,
    with_reductions,
    with_resharding,
)

SCHEDULES = [
    ("1F1B", 1),
    ("GPipe", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


def table(name, stages_per_rank, num_ranks, n):
    stage = SimpleNamespace(group_size=num_ranks, group_rank=0, is_last=False, submod=None)
    stage.num_stages = stages_per_rank * num_ranks
    return compute_order(get_schedule_class(name), [stage] * stages_per_rank, n)


def play(order, rank_of):
    """Run all ranks; a send and its receive happen together, as on a link without a buffer."""
    position = dict.fromkeys(order, 0)
    computed, received = set(), set()
    last = max(rank_of)

    def head(rank):
        actions = order[rank]
        return actions[position[rank]] if position[rank] < len(actions) else None

    while any(head(rank) for rank in order):
        before = dict(position)
        for rank in order:
            action = head(rank)
            if action is None or action.kind.startswith("RECV"):
                continue
            if action.kind.startswith("SEND"):
                direction = action.kind[-1]
                target = action.stage + (1 if direction == "F" else -1)
                other = rank_of[target]
                if head(other) != Action(f"RECV_{direction}", target, action.microbatch):
                    continue
                received.add((direction, target, action.microbatch))
                position[other] += 1
            elif action.kind in "FBI":
                direction = "F" if action.kind == "F" else "B"
                source = action.stage + (-1 if direction == "F" else 1)
                if 0 <= source <= last:
                    key = (direction, action.stage, action.microbatch)
                    local = rank_of[source] == rank
                    came = (direction, source, action.microbatch) in computed
                    assert came if local else key in received, (rank, action)
                computed.add((direction, action.stage, action.microbatch))
            position[rank] += 1
        assert position != before, {rank: head(rank) for rank in order}
    return computed


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("name, stages_per_rank", SCHEDULES)
def test_ranks_that_send_only_to_a_waiting_receiver_never_block(
    name, stages_per_rank, forward_only
):
    for num_ranks in (2, 3, 4):
        num_stages = stages_per_rank * num_ranks
        for n in (num_stages, 2 * num_stages):
            order = table(name, stages_per_rank, num_ranks, n)
            rank_of = rank_of_stages(order)
            for wanted in (1, n - 1, n):
                chosen = with_messages(select(order, wanted, forward_only), rank_of)
                directions = "F" if forward_only else "FB"
                assert play(chosen, rank_of) == {
                    (direction, stage, microbatch)
                    for direction in directions
                    for stage in range(num_stages)
                    for microbatch in range(wanted)
                }


def test_1f1b_of_three_ranks_is_the_order_of_the_paper():
    order = table("1F1B", 1, 3, 4)
    text = {rank: " ".join(f"{a.kind}{a.microbatch}" for a in row) for rank, row in order.items()}
    assert text == {
        0: "F0 F1 F2 B0 F3 B1 B2 B3",
        1: "F0 F1 B0 F2 B1 F3 B2 B3",
        2: "F0 B0 F1 B1 F2 B2 F3 B3",
    }


def test_gradients_are_reduced_after_the_last_backward_of_each_stage():
    actions = [Action(kind, stage, 0) for kind, stage in zip("FFIBW", (0, 2, 2, 0, 2), strict=True)]
    text = " ".join(f"{a.kind}{a.stage}" for a in with_reductions(actions))
    assert text == "F0 F2 I2 B0 REDUCE0 W2 REDUCE2"
    assert with_reductions(actions[:2]) == actions[:2]


def test_a_rank_with_many_stages_frees_those_that_are_not_among_the_next_three():
    actions = [Action("F", stage, 0) for stage in (0, 2, 4, 6, 0)]
    text = " ".join(f"{a.kind}{a.stage}" for a in with_resharding(actions))
    assert text == "F0 RESHARD0 F2 RESHARD2 F4 RESHARD4 F6 RESHARD6 F0"
    three = [Action("F", stage, 0) for stage in (0, 2, 4, 0, 2, 4)]
    assert with_resharding(three) == three


def test_order_whose_ranks_wait_for_each_other_is_refused():
    order = {0: [Action("B", 0, 0), Action("F", 0, 0)], 1: [Action("F", 1, 0), Action("B", 1, 0)]}
    with pytest.raises(ValueError, match="never compute the inputs of"):
        with_messages(order, {0: 0, 1: 1})


@pytest.mark.parametrize(
    "rows, got",
    [
        (["0F0,0B0", "1F0"], "stage 1, microbatch 0 has F"),
        (["0F0,0B0"], "stage 1, microbatch 0 has nothing"),
        (["0B0,0F0", "1F0,1I0,1W0"], "stage 0, microbatch 0 has B, F"),
    ],
)
def test_file_that_leaves_out_work_is_refused(tmp_path, rows, got):
    path = tmp_path / "order.csv"
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=got):
        compute_order(None, [SimpleNamespace(num_stages=2)], 1, str(path))
