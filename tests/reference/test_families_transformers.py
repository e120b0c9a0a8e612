"""Every family against its class in transformers on the same random weights; see `families`.

Our arguments are read from config.json, so that sizes stand in one table.
"""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.reference.families import (
    CASES,
    VOCAB,
    YARN_FIELDS,
    args_for_rows,
    build_hf_model,
    casts_to_fp64,
    hf_config,
    hf_model,
    hf_model_in_fp64,
    our_logits,
    our_model,
    their_logits,
    tokens_and_positions,
)
from torchtitan.checkpoint.hf import load_from_hf, save_to_hf
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_config import from_hf_config
from torchtitan.protocols.train_spec import get_train_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WITH_EXPERTS = [case for case, config in CASES.items() if "num_experts_per_tok" in config]


def opened(folder, reference):
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, config=config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("case", "is_fused"),
    [*((case, False) for case in CASES), *((case, True) for case in WITH_EXPERTS)],
)
def test_folder_gives_the_logits_of_each_document_alone_and_exports_open_there(
    case, is_fused, tmp_path
):
    """is_fused: one file with stacked experts, as transformers holds them; else files of the hub."""
    reference = hf_model(case)
    with torch.no_grad():
        theirs = their_logits(reference)
    how = {} if is_fused else {"max_shard_size": "20KB"}
    reference.save_pretrained(tmp_path, save_original_format=not is_fused, **how)
    files = {}
    for path in tmp_path.glob("*.safetensors"):
        files |= load_file(path)
    assert ("lm_head.weight" in files) != reference.config.tie_word_embeddings
    match = from_hf_config(tmp_path)
    spec, args = get_train_spec(match.family), args_for_rows(match)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    load_from_hf(model.state_dict(), spec.state_dict_adapter(args, None), str(tmp_path))
    largest = theirs.abs().max()
    assert theirs.std() > 0.1, "logits too small for the tolerance to tell anything"
    with torch.no_grad():
        assert (our_logits(model) - theirs).abs().max() <= 1e-5 * largest
    for assets, name in ((tmp_path, "copied_config"), (None, "config_from_args")):
        adapter = spec.state_dict_adapter(args, assets and str(assets))
        save_to_hf(model.state_dict(), adapter, str(tmp_path / name))
        export = opened(tmp_path / name, reference)
        assert export.dtype == torch.float32
        with torch.no_grad():
            assert (their_logits(export) - theirs).abs().max() <= 1e-6 * largest, name
    exported = adapter.spelled_like(files).to_hf(model.state_dict())
    assert exported.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name
    files = (folder / "config.json" for folder in (tmp_path, tmp_path / "copied_config"))
    read, of_export = (json.loads(file.read_text()) for file in files)
    # The layer that predicts a second token is not exported.
    expected = read | {key: 0 for key in ("num_nextn_predict_layers",) if key in read}
    assert expected.items() <= of_export.items()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_documents_alone_in_fp64(case):
    """Formulas are the same: no tolerance hides a wrong term."""
    reference = hf_model_in_fp64(case)
    with casts_to_fp64():
        config, weights = reference.config.to_dict(), reference.state_dict()
        changes = {"attn_type": "flex"}
        if case in WITH_EXPERTS:  # the kernel for all experts refuses fp64
            experts = from_hf_config(config).model_args.moe_args
            changes["moe_args"] = dataclasses.replace(experts, use_grouped_mm=False)
        model, adapter = our_model(config, weights, torch.float64, **changes)
        ours, theirs = our_logits(model), their_logits(reference)
        factors = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(3))
        for logits in (ours, theirs):
            (logits * factors).sum().backward()
    assert ours.dtype == theirs.dtype == torch.float64
    assert (ours - theirs).abs().max() <= 1e-12
    gradients = adapter.to_hf({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in reference.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max()
        assert error <= 1e-12 * max(1, parameter.grad.abs().max()), name
    reference.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_three_adamw_steps_have_the_losses_and_weights_of_transformers(case):
    """Rows are one document each, because transformers trains packed ones only with full attention."""
    reference = copy.deepcopy(hf_model(case))
    model, adapter = our_model(reference.config.to_dict(), reference.state_dict())
    is_tied = model.output.weight is model.tok_embeddings.weight
    assert is_tied == reference.config.tie_word_embeddings
    batch = torch.randint(2, VOCAB, (2, 34), generator=torch.Generator().manual_seed(2))
    tokens, labels = batch[:, :-1], batch[:, 1:].flatten()
    positions = torch.arange(33).expand(2, -1)
    masks = model.get_attention_masks(tokens, None, {"positions": positions})

    def losses(model, logits_of):
        # With AdamW's own eps, a gradient that is a rounding error makes a step of full size.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(3):
            loss = F.cross_entropy(logits_of().flatten(0, 1), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    theirs = [*losses(reference, lambda: reference(tokens, use_cache=False).logits)]
    ours = [*losses(model, lambda: model(tokens, masks, positions))]
    assert theirs[2] < theirs[0]
    assert ours == pytest.approx(theirs, abs=1e-4)
    weights = adapter.to_hf(model.state_dict())
    for name, tensor in reference.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4, msg=name)
    assert weights.keys() | {"lm_head.weight"} >= reference.state_dict().keys()


@pytest.mark.parametrize("case", CASES)
def test_config_means_the_same_in_the_hubs_spelling_and_as_transformers_writes_it(case, tmp_path):
    """What transformers writes has every field, so a field that ours lacks has its default."""
    config = hf_config(case)
    config.save_pretrained(tmp_path)
    match = from_hf_config(tmp_path)
    assert from_hf_config(config.to_dict()) == match
    assert match.flavor is None
    assert from_hf_config(CASES[case]).model_args == match.model_args
    older = json.loads((tmp_path / "config.json").read_text())
    if "rope_type" not in older["rope_parameters"]:
        return  # by kind of layer; `CASES` has an older spelling
    rope = older.pop("rope_parameters")
    for name in {"rope_theta", "partial_rotary_factor"} & {*rope}:
        older[name] = rope.pop(name)
    older["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    assert from_hf_config(older) == match


# ---- fields of config.json ----

# Tied weights are compared by the folders above; no group, or one of two experts, has no third expert.
NOT_CHANGED = [("tie_word_embeddings", True), ("tie_word_embeddings", False)]
NOT_CHANGED += [("topk_group", 0), ("topk_group", 1)]
FACTORS = ("partial_rotary_factor", "attention_factor")  # which a table of RoPE may have
OTHER_TEXTS = {"silu": "gelu", "gelu_pytorch_tanh": "silu"}


def changed_fields(content, path=()):
    """Yield (path, another value) for the fields of a config, also in its tables."""
    for name, value in content.items():
        others = []
        if isinstance(value, dict):
            yield from changed_fields(value, (*path, name))
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1, value - 1]
        elif isinstance(value, float):
            others = [value * 1.5 + 0.1, 1]
        elif isinstance(value, list):
            others = [value[1:] + value[:1]]
        elif value is None:
            others = [7, 0.5, True]
        elif value in OTHER_TEXTS:
            others = [OTHER_TEXTS[value]]
        for other in others:
            if (name, other) not in NOT_CHANGED:
                yield (*path, name), other


@torch.no_grad()
def whole_rows(model):
    """Return the logits of rows of one document each, of our model or transformers'."""
    tokens, _ = tokens_and_positions()
    if not isinstance(model, Decoder):
        return model(tokens, use_cache=False).logits
    return model(tokens, model.get_attention_masks(tokens, None))


def check_like_transformers(case, config, field, before=None):
    """Check that our model of a config has transformers' logits, or that `field` is refused.

    before: return False, and check nothing, if transformers has no such model with the weights of `case`, or
        has these logits for it, too.
    """
    weights = hf_model(case).state_dict()
    try:
        other = build_hf_model(config)
        other.load_state_dict(weights)
        theirs = whole_rows(other)
    except Exception:
        return False
    if before is not None and not (theirs - before).abs().max() > 1e-5:
        return False
    try:
        ours, _ = our_model(config, weights, attn_type="flex", attn_mask_type="causal")
    except ValueError as error:
        assert field in str(error)
        return True
    assert (whole_rows(ours) - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    return True


@pytest.mark.parametrize("case", CASES)
def test_field_that_changes_transformers_logits_changes_ours_likewise_or_is_refused(case):
    reference, whole_config = hf_model(case), hf_config(case).to_dict()
    before, n_changing = whole_rows(reference), 0
    fields = type(reference.config).__annotations__.keys()
    changes = [*changed_fields({k: v for k, v in whole_config.items() if k in fields})]
    if "rope_type" in whole_config["rope_parameters"]:
        changes += [(("rope_parameters", name), 0.5) for name in FACTORS]
    for path, value in changes:
        table = config = copy.deepcopy(whole_config)
        for name in path[:-1]:
            table = table[name]
        table[path[-1]] = value
        n_changing += check_like_transformers(case, config, path[-1], before)
    assert n_changing


FLAT_YARN = {"rope_type": "yarn", "rope_theta": 1e3, **YARN_FIELDS}
# transformers ignores one table where it has one for each kind of layer, and takes a rope_theta of OLMo 3
# for full attention only.
QUIRKS = [
    ("olmo3", {"rope_parameters": FLAT_YARN}),
    ("gemma3, layers", {"rope_parameters": FLAT_YARN}),
    ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}),
    ("gemma3, layers", {"rope_parameters": None, "rope_theta": 1e4}),
    ("gemma4", {"rope_parameters": None, "rope_theta": 1e4}),
]


@pytest.mark.parametrize(("case", "change"), QUIRKS)
def test_rope_tables_that_transformers_reads_in_its_own_way_are_read_likewise_or_refused(
    case, change
):
    config = {k: v for k, v in (CASES[case] | change).items() if v is not None}
    assert check_like_transformers(case, config, "rope")


# ---- configs that no model here can express ----

NOT_SCALED = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
# case, the field that the message has to name, a value that cannot be expressed and that no test above has
REFUSED = [
    ("llama", "num_key_value_heads", 3),
    ("llama", "rope_type", NOT_SCALED),
    ("deepseek_v3", "topk_method", "greedy"),
    ("qwen3_5", "attn_output_gate", False),
    ("qwen3_5", "output_gate_type", "sigmoid"),
    ("qwen3_5", "layer_types", ["mamba"] * 4),
    ("qwen3_5", "linear_num_key_heads", 3),
    ("qwen3_5", "rope_type", NOT_SCALED),
    ("gemma3", "use_bidirectional_attention", True),
    ("gemma4", "num_kv_shared_layers", 2),
    ("gemma4", "hidden_size_per_layer_input", 8),
    ("gemma4", "enable_moe_block", True),
    ("gemma4", "use_bidirectional_attention", "all"),
    ("gemma4", "per_layer_config", {"per_layer_config": {"1": {"head_dim": 16}}}),
    ("gemma4", "layer_types", ["chunked_attention"] * 4),
    ("mixtral", "router_jitter_noise", 0.1),
    ("olmoe", "clip_qkv", 0.6),
    ("minimax_m2", "scoring_func", "softmax"),
    ("minimax_m2", "use_routing_bias", False),
    ("minimax_m2", "use_qk_norm", False),
    ("minimax_m2", "qk_norm_type", "per_head"),
]


@pytest.mark.parametrize(("case", "field", "value"), REFUSED)
def test_config_that_cannot_be_expressed_is_refused_by_the_name_of_its_field(case, field, value):
    from_hf_config(CASES[case])
    change = value if isinstance(value, dict) else {field: value}
    with pytest.raises(ValueError, match=f"it has {field} = "):
        from_hf_config(CASES[case] | change)


# ---- folders of multimodal models ----

# model_type of the folder, its text model, prefix of the text model's tensors, further tensors
VISION = {"model.visual.x.weight": torch.ones(3)}
MULTIMODAL = [
    ("qwen3_5", "qwen3_5", "model.language_model.", VISION | {"mtp.fc.weight": torch.ones(3)}),
    ("qwen3_5_moe", "qwen3_5_moe", "model.language_model.", VISION),
    ("gemma3", "gemma3", "model.language_model.", {"model.vision_tower.x": torch.ones(3)}),
    ("gemma3", "gemma3", "language_model.model.", {"vision_tower.x": torch.ones(3)}),
    ("gemma4", "gemma4", "model.language_model.", {"model.embed_vision.x": torch.ones(3)}),
    ("mistral3", "ministral3", "model.language_model.", {"model.vision_tower.x": torch.ones(3)}),
    ("mistral3", "ministral3", "language_model.model.", {"vision_tower.x": torch.ones(3)}),
    ("llama4", "llama4", "language_model.model.", {"vision_model.x": torch.ones(3)}),
]


@pytest.mark.parametrize(("outer", "case", "prefix", "others"), MULTIMODAL)
def test_text_model_is_read_from_the_folder_of_a_multimodal_model(
    outer, case, prefix, others, tmp_path
):
    reference = hf_model(case)
    reference.save_pretrained(tmp_path)
    text = load_file(tmp_path / "model.safetensors")
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."

    def nested(name):
        name = name.replace("lm_head.", head)
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    files = {nested(name): tensor for name, tensor in text.items()}
    save_file(files | others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    match = from_hf_config(tmp_path)
    config = {"model_type": outer, "vision_config": {}}
    config["text_config"] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert from_hf_config(tmp_path) == match

    spec, args = get_train_spec(match.family), args_for_rows(match)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    adapter = spec.state_dict_adapter(args, None)
    load_from_hf(model.state_dict(), adapter, str(tmp_path))
    plain, _ = our_model(CASES[case], text)
    assert torch.equal(our_logits(model), our_logits(plain))
    written = adapter.spelled_like(files | others).to_hf(model.state_dict())
    assert written.keys() == files.keys()
    assert adapter.spelled_like(text).to_hf(model.state_dict()).keys() == text.keys()


@pytest.mark.parametrize("outer", ["kimi_k2", "kimi_k25"])
def test_kimi_k2_is_a_deepseek_v3(outer):
    inner = CASES["deepseek_v3"] | {"model_type": "kimi_k2"}
    config = inner if outer == "kimi_k2" else {"model_type": outer, "text_config": inner}
    assert from_hf_config(config) == from_hf_config(CASES["deepseek_v3"])
