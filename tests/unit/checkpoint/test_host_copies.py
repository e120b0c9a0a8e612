"""Copies of states in host memory that is used again for the next copies."""

import torch

from torchtitan.checkpoint.saver import HostCopies


def state(value: float, size: int = 3, **more) -> dict:
    return {"weight": torch.full((size,), value), "inner": [torch.tensor(value), "text"], **more}


def test_copies_are_of_their_own_memory_which_is_used_again():
    copies, live = HostCopies(), state(1)
    copies.prepare(lambda: live)
    first = copies.stage(live)
    place = first["weight"].data_ptr()
    live["weight"].fill_(5)
    assert first["weight"].tolist() == [1, 1, 1] and first["inner"] == [1, "text"]
    second = copies.stage(live)
    assert second["weight"].tolist() == [5, 5, 5]
    assert second["weight"].data_ptr() == place


def test_states_of_another_layout_get_memory_of_their_own():
    copies = HostCopies()
    for other in (state(1), state(2, size=1), state(3, bias=torch.ones(2)), state(4)):
        copied = copies.stage(other)
        assert copied.keys() == other.keys()
        assert all(torch.equal(copied[k], other[k]) for k in other if k != "inner")
    half = {"weight": torch.ones(3, dtype=torch.bfloat16)}
    assert copies.stage(half)["weight"].dtype == torch.bfloat16
