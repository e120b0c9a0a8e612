"""Weights as a stream of Hugging Face tensors, their pieces, and their digest."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.layout_matrix import FAMILIES, register_tiny
from tests.unit.checkpoint.runs import assert_same
from tests.unit.models.tiny import Operators, on_meta
from torchtitan.checkpoint import stream as weight_stream
from torchtitan.checkpoint.hf import save_to_hf
from torchtitan.checkpoint.states import cast_weights
from torchtitan.checkpoint.stream import LocalShard, WeightStream, digest_of, fingerprint
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import get_train_spec

TIED = "qwen3, tied"
# Without the models that Hugging Face files cannot hold.
CASES = [name for name in FAMILIES if name not in ("qwen3 MoE, two experts", "gates and scales")]
CPU = torch.device("cpu")


@functools.cache
def model_of(case):
    """(model, adapter) of a tiny model of the family, filled with distinct numbers."""
    spec = get_train_spec(register_tiny(case))
    args = spec.model_args["tiny"]
    model = on_meta(spec.model_cls, args).to_empty(device="cpu")
    first = 0
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        if tensor.is_floating_point():
            tensor.data = torch.arange(first, first + tensor.numel()).view(tensor.shape).float()
            first += tensor.numel()
    return model, spec.state_dict_adapter(args, None)


def translated(case):
    model, adapter = model_of(case)
    return adapter.to_hf(model.state_dict())


def stream_of(case, **options):
    model, adapter = model_of(case)
    return WeightStream([model], adapter, CPU, **options)


@pytest.mark.parametrize("case", CASES)
def test_stream_has_every_tensor_of_the_translated_model(case):
    expected = translated(case)
    is_tied = case in (TIED, "gemma4")
    if is_tied:
        assert "lm_head.weight" not in expected
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    stream = stream_of(case)
    assert stream.digest is None
    streamed = list(stream)
    found = dict(streamed)
    assert len(found) == len(streamed)
    assert_same(found, expected)
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert stream.digest == digest_of(expected.items())
    if is_tied:
        assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("case", ["qwen3 MoE", "deepseek_v3", "llama4", "gpt_oss"])
def test_parameters_are_cast_but_routers_and_buffers_keep_fp32(case):
    model, _ = model_of(case)
    stream = stream_of(case, dtype=torch.bfloat16)
    kept = [name for name, tensor in stream if tensor.dtype == torch.float32]
    n_routers = sum(".router." in name for name, _ in model.named_parameters())
    n_biases = sum(name.endswith("expert_bias") for name, _ in model.named_buffers())
    if case != "deepseek_v3":  # files of the other families cannot hold the bias
        n_biases = 0
    assert n_routers and len(kept) == n_routers + n_biases
    assert all(any(word in name for word in ("gate.", "router.")) for name in kept)


def test_decay_of_linear_attention_is_fp32_in_every_export(tmp_path):
    model, adapter = model_of("qwen3_5")
    state = model.state_dict()
    save_to_hf(state, adapter, str(tmp_path), torch.bfloat16)
    files = load_file(tmp_path / "model-00001-of-00001.safetensors")
    exports = (
        files,
        adapter.to_hf(cast_weights(state, torch.bfloat16)),
        dict(stream_of("qwen3_5", dtype=torch.bfloat16)),
    )
    decay = {name for name in files if name.endswith(("A_log", "dt_bias"))}
    assert len(decay) == 4
    for export in exports:
        assert {name for name, x in export.items() if x.dtype == torch.float32} == decay
        assert {x.dtype for x in export.values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("case", CASES)
def test_no_more_than_one_tensor_or_stack_of_experts_is_gathered_at_once(case):
    model, adapter = model_of(case)
    state = model.state_dict()
    groups = adapter.groups_of(state)
    for names in groups:
        is_stack = all(".experts.w" in name for name in names)
        is_joined = case.startswith("qwen3_5") and len({name.split(".")[1] for name in names}) == 1
        assert len(names) == 1 or is_stack or is_joined
    assert len({name for names in groups for name in names}) == sum(map(len, groups))


def blocks_of(tensor, generator):
    """The tensor in blocks, cut at random along one dim, as `LocalShard`s."""
    dim = int(torch.randint(tensor.ndim, (), generator=generator))
    cuts = torch.randint(1, tensor.shape[dim] + 1, (3,), generator=generator).tolist()
    edges = sorted({0, *cuts, tensor.shape[dim]})
    for begin, end in zip(edges, edges[1:], strict=False):
        offsets = tuple(begin if d == dim else 0 for d in range(tensor.ndim))
        block = tensor.narrow(dim, begin, end - begin)
        yield LocalShard(block, offsets, tuple(tensor.shape))


def paste(pieces, may_overlap=False):
    """name -> the tensor put together from its pieces, which cover each place, and agree where they overlap."""
    whole, counts = {}, {}
    for name, (tensor, offsets, shape) in pieces:
        place = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        target = whole.setdefault(name, tensor.new_zeros(shape))
        count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int64))
        is_filled = count[place] > 0
        assert torch.equal(target[place][is_filled], tensor[is_filled]), name
        target[place] = tensor
        count[place] += 1
    for name, count in counts.items():
        assert (count > 0).all() if may_overlap else (count == 1).all(), name
    return whole


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_our_tensors_are_blocks_of_the_translated_ones(case):
    """Tensors are cut through heads, experts, rows and columns; no piece is a copy."""
    model, adapter = model_of(case)
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for name, tensor in model.state_dict().items():
        for block in blocks_of(tensor, generator):
            translated_block = list(adapter.shards_to_hf(name, block))
            for _, piece in translated_block:
                storage = piece.tensor.untyped_storage()
                assert storage.data_ptr() == tensor.untyped_storage().data_ptr()
            pieces += translated_block
    assert_same(paste(pieces), translated(case))


def test_sharded_stream_of_one_process_is_the_whole_model():
    assert_same(paste(stream_of(TIED, sharded=True)), dict(stream_of(TIED)))


def test_adapter_that_cannot_translate_shards_names_the_way_out():
    class Renaming(StateDictAdapter):
        def to_hf(self, state_dict):
            return {f"model.{name}": tensor for name, tensor in state_dict.items()}

        def from_hf(self, hf_state_dict):
            raise AssertionError

    model = torch.nn.Linear(2, 3)
    stream = WeightStream([model], Renaming(None, None), CPU, dtype=torch.float64)
    dtypes = {name: tensor.dtype for name, tensor in stream}
    assert dtypes == {"model.weight": torch.float64, "model.bias": torch.float64}
    with pytest.raises(NotImplementedError, match="sharded=False"):
        list(WeightStream([model], Renaming(None, None), CPU, sharded=True))


def test_weights_that_change_while_they_are_streamed_are_an_error():
    version = 3
    stream = stream_of(TIED, current_version=lambda: version)
    assert stream.version == 3
    iterator = iter(stream)
    next(iterator)
    version = 4
    with pytest.raises(RuntimeError, match="from version 3 to 4"):
        next(iterator)
    assert stream.digest is None
    list(stream)
    assert stream.version == 4 and stream.digest is not None


# ---- digest ----


def slow_fingerprint(data: bytes) -> int:
    """Computed with Python's integers."""
    weights = [word % 2**64 for word in weight_stream._weights("cpu").tolist()]
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    size = len(weights)
    while len(words) > 1:
        n_rows = len(words) // size
        rows = [words[i * size : (i + 1) * size] for i in range(n_rows + 1)]
        words = [sum(x * w for x, w in zip(row, weights, strict=False)) for row in rows]
        words = [word % 2**64 for word in words]
    return sum(words) % 2**64


@pytest.mark.parametrize("n_bytes", [0, 1, 7, 8, 9, 800, 8 * 2**15, 8 * 2**15 * 3 + 21])
def test_fingerprint_is_the_weighted_sum_modulo_2_to_64(n_bytes):
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)
    assert int(fingerprint(data)) % 2**64 == slow_fingerprint(bytes(data.tolist()))


def test_fingerprint_changes_with_one_bit_anywhere():
    for bit in (0, 63):
        words = torch.diag(torch.tensor(1) << torch.full((64,), bit))
        assert all(fingerprint(word) != 0 for word in words)


def test_accelerators_way_to_add_up_gives_the_same(monkeypatch):
    words = torch.randint(-(2**62), 2**62, (5, 2**15))
    weights = weight_stream._weights("cpu")
    (expected,) = weight_stream._sums_of(words, weights)
    monkeypatch.setattr(weight_stream, "_ROWS_AT_ONCE", 2)
    monkeypatch.setattr(torch, "mv", None)  # which accelerators lack
    pieces = weight_stream._sums_of(Elsewhere(words), weights)
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat(pieces), expected)


class Elsewhere:
    """A host tensor whose `device` claims an accelerator."""

    device = torch.device("cuda")

    def __init__(self, tensor):
        self.split = tensor.split


def test_digest_tells_of_every_bit_name_dtype_and_shape_but_not_of_order_or_layout():
    weights = {"a": torch.randn(300, 7), "b": torch.randn(33).bfloat16(), "c": torch.tensor(1)}
    digest = digest_of(weights.items())
    assert digest == digest_of(reversed(weights.items()))
    strided = weights | {"a": weights["a"].t().contiguous().t()}
    assert digest == digest_of(strided.items())
    unaligned = torch.cat([torch.zeros(1), weights["a"].flatten()])[1:].view(300, 7)
    assert digest == digest_of((weights | {"a": unaligned}).items())

    flipped = weights["a"].clone()
    flipped.view(torch.int32)[123, 4] ^= 1
    swapped = weights["a"].clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    others = [
        weights | {"a": flipped},
        weights | {"a": swapped},
        weights | {"a": weights["a"].view(7, 300)},
        weights | {"b": weights["b"].view(torch.float16)},
        {("d" if name == "b" else name): tensor for name, tensor in weights.items()},
        {name: tensor for name, tensor in weights.items() if name != "c"},
    ]
    digests = {digest_of(other.items()) for other in others}
    assert len(digests) == len(others) and digest not in digests


def test_digest_reads_the_sums_of_all_tensors_at_once():
    digest = weight_stream.WeightDigest()
    for n in range(3):
        digest.add(str(n), torch.full((4,), float(n)))
    with Operators() as operators:
        digest.hexdigest()
    read = torch.ops.aten._local_scalar_dense.default  # each would wait for the device
    assert operators.calls and read not in [call for call, _ in operators.calls]
