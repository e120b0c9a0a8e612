"""Updates of what changed: bit for bit the sender's weights, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.rl.weight_transport import WeightChanges
from torchtitan.tools.errors import RunError

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_receiver_has_the_senders_bits_after_every_update(data):
    """Also NaN, whose bits a comparison of numbers misses, and zeros of either sign."""
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.sampled_from([0, 1, 7, 300, 2**16 - 1, 2**16, 2**16 + 1, 2 * 2**16 + 5]))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    highest = 2 if dtype == torch.bool else 256
    n_bytes = size * dtype.itemsize
    sent = torch.randint(highest, (n_bytes,), generator=rng, dtype=torch.uint8)
    sender, receiver = WeightChanges(), WeightChanges()
    for share in (1.0, *data.draw(st.lists(st.sampled_from([0.0, 1e-3, 0.1, 0.6]), max_size=3))):
        where = torch.rand(n_bytes, generator=rng) < share
        new = torch.randint(highest, (n_bytes,), generator=rng, dtype=torch.uint8)
        sent = torch.where(where, new, sent)
        tensor = sent.view(dtype)
        ((name, packed),) = sender.packed([("w", tensor.clone())])
        ((name, received),) = receiver.unpacked([(name, packed.clone())])
        assert name == "w" and received.dtype == dtype and received.shape == tensor.shape
        assert bits(received).equal(bits(tensor))
        assert packed.nbytes <= max(tensor.nbytes, 8)


def test_few_changes_are_few_bytes():
    old = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    new = old.clone()
    new.view(-1)[::100] = 1
    sender = WeightChanges()
    (first,) = sender.packed([("w", old)])
    (second,) = sender.packed([("w", new)])
    assert first[1] is old
    assert second[1].nbytes == (10_000 + 15) * (2 + 2) + 8  # also 15 multiples of 65,535


def test_receiver_that_lacks_an_update_refuses_the_next():
    versions = [torch.arange(100.0) + (torch.arange(100) == i) for i in (1, 2, 3)]
    sender, receiver = WeightChanges(), WeightChanges()
    first, second, third = (next(iter(sender.packed([("w", w)]))) for w in versions)
    message = "only the changes of w since the previous update, which this receiver does not have"
    for received in ([second], [first, third]):
        with pytest.raises(RunError, match=message):
            list(WeightChanges().unpacked((name, x.clone()) for name, x in received))
    for update in (first, second, third):
        ((_, found),) = receiver.unpacked([update])
    assert found.equal(versions[2])


def test_weights_that_are_not_packed_pass_unchanged():
    weight = torch.ones(3)
    ((name, found),) = WeightChanges().unpacked([("layers.0.w", weight)])
    assert name == "layers.0.w" and found is weight
