"""Tables of names and layouts, on plain tensors."""

import pytest
import torch

from torchtitan.checkpoint.hf import load_from_hf, save_to_hf
from torchtitan.distributed.dtensor import LocalShard
from torchtitan.models.hf_adapter import HF_EXPERTS, Fused, KeyMapAdapter

E, H, D = 4, 6, 5
W1, W2, W3 = (f"layers.{{}}.moe.experts.w{n}" for n in (1, 2, 3))


class PerExpert(KeyMapAdapter):
    from_hf_map = {"norm": "norm", "model.old": None} | HF_EXPERTS
    ignored_hf_keys = (r"model\.layers\.2\.", "vision_model")


class FusedExperts(KeyMapAdapter):
    """Llama 4's fused tensors."""

    from_hf_map = {
        "prefix.layers.{}.gate_up": Fused((W1, W3), transposed=True),
        "prefix.layers.{}.down": Fused((W2,), transposed=True),
    }


class WithBias(KeyMapAdapter):
    from_hf_map = {"layers.{}.bias": "layers.{}.moe.expert_bias", "norm": "norm"}


def expert_weights(n_experts=E, layers=(0, 11)):
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (n_experts, H, D), "w2": (n_experts, D, H), "w3": (n_experts, H, D)}
    return {
        f"layers.{layer}.moe.experts.{name}": torch.randn(shape, generator=generator)
        for layer in layers
        for name, shape in shapes.items()
    }


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def shares_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_reading_into_the_views_changes_the_parameter_without_a_copy():
    ours = expert_weights()
    adapter = PerExpert(None, None)
    files = adapter.to_hf(ours)
    for tensor in files.values():
        tensor.fill_(7)
    assert all(tensor.eq(7).all() for tensor in ours.values())
    back = adapter.from_hf(files)
    assert all(shares_memory(back[name], tensor) for name, tensor in ours.items())
    assert same(back, ours)


def test_half_of_a_fused_tensor_is_an_error():
    ours = expert_weights()
    del ours["layers.11.moe.experts.w3"]
    with pytest.raises(ValueError, match=r"joins in prefix\.layers\.11\.gate_up"):
        FusedExperts(None, None).to_hf(ours)


def test_missing_expert_is_named():
    files = PerExpert(None, None).to_hf(expert_weights())
    del files["model.layers.0.mlp.experts.2.down_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.0\.moe\.experts\.w2 .* \[2\] are missing"):
        PerExpert(None, None).from_hf(files)


@pytest.mark.parametrize(
    ("adapter", "value", "names", "is_told"),
    [
        (PerExpert(None, None), 1, {"norm"}, True),
        (PerExpert(None, None), 0, {"norm"}, False),
        (WithBias(None, None), 1, {"layers.0.bias", "norm"}, False),
        # Files of an older model have no such tensor.
        (WithBias(None, None).spelled_like(["norm"]), 0, {"norm"}, False),
    ],
)
def test_expert_bias_stays_behind_where_files_have_no_place_for_it_and_export_tells(
    adapter, value, names, is_told, tmp_path, caplog
):
    state = {"layers.0.moe.expert_bias": torch.full((E,), value), "norm": torch.ones(1)}
    assert set(adapter.to_hf(state)) == names
    save_to_hf(state, adapter, str(tmp_path / "export"))
    assert ("cannot hold layers.0.moe.expert_bias" in caplog.text) == is_told


def test_ignored_and_unknown_names():
    adapter = PerExpert(None, None)
    ignored = ["model.layers.2.anything", "vision_model.x.0", "model.old"]
    assert all(adapter.ignores_hf_key(name) for name in ignored)
    assert not adapter.ignores_hf_key("model.layers.21.mlp.gate.weight")
    assert adapter.from_hf(dict.fromkeys(ignored, torch.ones(1))) == {}
    with pytest.raises(ValueError, match=r"1 key\(s\) of the Hugging Face weights.*: model\.new;"):
        adapter.from_hf({"model.new": torch.ones(1), "norm": torch.ones(1)})
    with pytest.raises(ValueError, match=r"the model's state dict.*: new;"):
        adapter.to_hf({"new": torch.ones(1)})


# ---- rows in unequal parts, and in groups ----

HEADS = 3  # groups
PARTS = {"q": 2, "k": 2, "v": 4}  # rows of a head


class Joined(KeyMapAdapter):
    """Per head: queries, keys and values, as Qwen3-Next has them; and a convolution of all heads' rows."""

    from_hf_map = {
        "layers.{}.qkv": Fused(
            tuple(f"layers.{{}}.{name}" for name in PARTS), rows=(1, 1, 2), n_groups=HEADS
        ),
        "layers.{}.conv": Fused(("layers.{}.a", "layers.{}.b"), rows=(3, 1), has_middle=True),
    }


def joined_weights():
    generator = torch.Generator().manual_seed(0)
    rows = {name: HEADS * n for name, n in PARTS.items()} | {"a": 9, "b": 3}
    return {f"layers.4.{name}": torch.randn(n, D, generator=generator) for name, n in rows.items()}


def joined_by_hand(ours):
    rows = []
    for head in range(HEADS):
        for name, n in PARTS.items():
            rows += [ours[f"layers.4.{name}"][head * n + row] for row in range(n)]
    conv = [*ours["layers.4.a"], *ours["layers.4.b"]]
    return {"layers.4.qkv": torch.stack(rows), "layers.4.conv": torch.stack(conv)[:, None]}


def test_pieces_cut_through_heads_are_pieces_of_the_joined_tensor():
    ours = joined_weights()
    whole = {name: torch.full_like(t, torch.nan) for name, t in joined_by_hand(ours).items()}
    for name, tensor in ours.items():
        for first, end in ((0, 1), (1, 5), (5, len(tensor))):
            shard = LocalShard(tensor[first:end], (first, 0), tuple(tensor.shape))
            for hf_name, piece in Joined(None, None).shards_to_hf(name, shard):
                assert piece.shape == tuple(whole[hf_name].shape)
                ends = zip(piece.offsets, piece.tensor.shape, strict=True)
                place = whole[hf_name][tuple(slice(o, o + n) for o, n in ends)]
                assert place.isnan().all()
                place.copy_(piece.tensor)
    assert same(whole, joined_by_hand(ours))


class JoinedModules(KeyMapAdapter):
    from_hf_map = {"layers.{}.qkv": Fused(("layers.{}.wq.weight", "layers.{}.wk.weight"))}


def test_joined_modules_are_saved_and_loaded_together_however_large_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.checkpoint.hf._BYTES_PER_PART", 1)
    ours = {f"layers.{n}.{name}.weight": torch.randn(3, 2) for n in (0, 1) for name in ("wq", "wk")}
    save_to_hf(ours, JoinedModules(None, None), str(tmp_path / "export"))
    read = {name: torch.zeros(3, 2) for name in ours}
    assert same(load_from_hf(read, JoinedModules(None, None), str(tmp_path / "export")), ours)


# ---- multimodal files ----


class Text(KeyMapAdapter):
    text_prefixes = ("model.language_model.", "language_model.")

    def __init__(self, index=None):
        super().__init__(None, None)
        self.fqn_to_index_mapping = index
        names = {"model.layers.{}.a": "layers.{}.x", "model.layers.1.b": "layers.1.x"}
        self.name_text_model({"lm_head.weight": "output.weight"} | names)


OURS = ["output.weight", "layers.0.x", "layers.1.x"]
NAMES = ["lm_head.weight", "model.layers.0.a", "model.layers.1.b"]
NEW = ["lm_head.weight", "model.language_model.layers.0.a", "model.language_model.layers.1.b"]
OLD = [f"language_model.{name}" for name in NAMES]


@pytest.mark.parametrize("names", [NAMES, NEW, OLD])
def test_each_spelling_of_a_multimodal_model_is_read_and_written(names):
    ours = {name: torch.ones(n + 1) for n, name in enumerate(OURS)}
    files = dict(zip(names, ours.values(), strict=True))
    assert same(Text().from_hf(files), ours)
    in_index = Text(dict.fromkeys(names, 1))
    for adapter in (Text().spelled_like(names), in_index, Text().for_export(names)):
        assert same(adapter.to_hf(ours), files)
    alone = Text(dict.fromkeys(names, 3)).for_export([])
    assert list(alone.to_hf(ours)) == NAMES
    assert {name: alone.fqn_to_index_mapping[name] for name in NAMES} == dict.fromkeys(NAMES, 3)
