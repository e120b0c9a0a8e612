import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from torchtitan import quantization
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import model_converter
from torchtitan.protocols.model_converter import (
    ModelConvertersContainer,
    build_model_converters,
    register_model_converter,
)
from torchtitan.quantization import module_filter_fn

needs_mx = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="MXFP8 of torchao needs a newer torch"
)

EMULATED = ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.emulate"]
GATHERED = [*EMULATED, "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
MX = ["--model.converters=quantize.linear.mx", "--quantize.linear.mx.recipe_name=mxfp8_emulated"]


def build(*flags: str, n_ranks: int = 1) -> ModelConvertersContainer:
    return converters_of(ConfigManager().parse_args(list(flags)), n_ranks)


def converters_of(config: JobConfig, n_ranks: int = 1) -> ModelConvertersContainer:
    others = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1)
    return build_model_converters(
        config, ParallelDims(**others, dp_shard=n_ranks, world_size=n_ranks)
    )


def build_named(*names: str) -> ModelConvertersContainer:
    config = JobConfig()
    config.model.converters = list(names)
    return converters_of(config)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(model_converter, "_registry_model_converter_cls", {})


class Recorder:
    """Records its calls."""

    calls: list = []

    def __init__(self, job_config, parallel_dims):
        pass

    def convert(self, model):
        self.calls.append((type(self), model))

    post_optimizer_hook = convert


class OtherRecorder(Recorder):
    pass


def test_converters_run_in_config_order(registry, monkeypatch):
    monkeypatch.setattr(Recorder, "calls", [])
    register_model_converter(Recorder, "a")
    register_model_converter(OtherRecorder, "b")
    container = build_named("b", "a")
    model = nn.Linear(1, 1)
    container.convert(model)
    container.post_optimizer_hook([model])
    assert Recorder.calls == [
        (cls, x) for x in (model, [model]) for cls in (OtherRecorder, Recorder)
    ]


@pytest.mark.parametrize("name", ["mine", "quantize.linear.float8"])
def test_registering_a_taken_name_is_an_assertion_error(registry, name):
    register_model_converter(Recorder, "mine")
    with pytest.raises(AssertionError, match=f"{name}.*exists already"):
        register_model_converter(Recorder, name)


def test_unknown_converter_is_a_key_error_that_names_the_choices():
    with pytest.raises(KeyError) as error:
        build_named("quantize.linear.float9")
    assert str(error.value).startswith("model.converters: 'quantize.linear.float9' is unknown")
    assert "'quantize.linear.float8'" in str(error.value)
    assert isinstance(error.value, ValueError)


# --- quantization ---------------------------------------------------------------------------


class Block(nn.Module):
    """Two linear layers of which `small` does not fit the float8 kernels."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 64)
        self.small = nn.Linear(64, 8)
        self.output = nn.Linear(64, 32)

    def forward(self, x):
        return self.output(self.wide(x))


def convert(*flags, dtype=torch.float32, n_ranks=1):
    """Return (converter, a model, the model after conversion)."""
    (converter,) = build(*flags, n_ranks=n_ranks).converters
    torch.manual_seed(0)
    plain = Block().to(dtype)
    model = copy.deepcopy(plain)
    converter.convert(model)
    return converter, plain, model


@pytest.mark.parametrize(
    "module, filter_fqns, converted",
    [
        (nn.Linear(32, 16), ["output"], True),
        (nn.Linear(32, 16), ["output", "layers.0"], False),
        (nn.Linear(8, 32), [], False),
        (nn.Embedding(16, 16), [], False),
    ],
)
def test_only_linear_layers_that_fit_and_pass_the_filters_are_converted(
    module, filter_fqns, converted
):
    assert module_filter_fn(module, "layers.0.wq", filter_fqns) is converted


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["quantize.linear.float8"], "8.9.*float8.emulate = true and compile.enable = false"),
        ([*EMULATED[1:], "--compile.enable"], "compile.enable = false"),
        (["quantize.grouped_mm.float8"], "quantize.grouped_mm.float8 needs a GPU"),
        (["quantize.linear.mx"], "quantize.linear.mx needs a GPU of compute capability 10.0"),
        (["quantize.grouped_mm.mx"], "grouped_mm.mx needs a GPU of compute capability 10.0"),
    ],
)
def test_missing_hardware_is_an_error_with_the_remedy(flags, message, no_gpu):
    with pytest.raises(ValueError, match=message):
        build("--model.converters", *flags)


@pytest.fixture
def gpu(monkeypatch):
    """Sets the compute capability of an imaginary GPU."""
    import torchao.float8  # noqa: F401 (reads the capability on import)
    import torchao.prototype.moe_training.config  # noqa: F401

    def of_capability(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)

    return of_capability


@pytest.mark.parametrize("compiled", [False, True])
def test_rowwise_float8_on_one_gpu_warns_unless_it_is_compiled(gpu, compiled, caplog):
    import torch._inductor.config

    rowwise = [*EMULATED[:2], "--quantize.linear.float8.recipe_name=rowwise"]
    gpu(8, 6)
    with pytest.raises(ValueError, match="compute capability 8.9"):
        build(*rowwise, "--compile.enable")
    gpu(8, 9)
    with torch._inductor.config.patch(emulate_precision_casts=False):
        (converter,) = build(*rowwise, *["--compile.enable"] * compiled).converters
    assert not converter.config.emulate
    assert converter.config.cast_config_weight.scaling_granularity.name == "AXISWISE"
    assert ("slower than bf16: set compile.enable" in caplog.text) is not compiled
    with torch.device("meta"):
        model = Block()
    converter.convert(model)
    assert type(model.wide).__name__ == "Float8Linear"


@needs_mx
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_that_are_converted_compute_in_8_bits(dtype, gpu, monkeypatch):
    from torchtitan.distributed import token_groups
    from torchtitan.models.moe.moe import GroupedExperts
    from torchtitan.quantization import mx

    gpu(10, 0)
    monkeypatch.setattr(token_groups, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    from_recipe = mx._from_recipe
    monkeypatch.setattr(
        mx, "_from_recipe", lambda config, name: from_recipe(config, "MXFP8_EMULATED_RCEIL")
    )
    flags = "--model.converters=quantize.grouped_mm.mx", "--quantize.grouped_mm.mx.fqns=experts"
    (converter,) = build(*flags, "--compile.enable").converters
    monkeypatch.undo()  # the CPU again
    assert token_groups.TOKEN_GROUP_ALIGN_SIZE_M == 8
    torch.manual_seed(0)
    plain = nn.ModuleDict({"experts": GroupedExperts(64, 64, 4, use_grouped_mm=True)}).to(dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(plain)
    converter.convert(model)
    x = torch.randn(96, 64, dtype=dtype)
    counts = torch.tensor([32, 0, 32, 32])
    for part in (plain, model):
        part["experts"](x, counts).float().square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        # Single products are off by up to 1/16, as in float8.
        assert 1e-3 * p.grad.norm() < (p.grad - q.grad).norm() < 0.1 * p.grad.norm()


def test_missing_torchao_names_the_extra(monkeypatch):
    missing = mock.Mock(side_effect=ImportError("No module named 'torchao'"))
    monkeypatch.setattr(quantization, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install -U torchtitan-embeddable\[float8\]"):
        build(*EMULATED)


def test_emulated_float8_trains_on_cpu_close_to_fp32():
    converter, plain, model = convert(*EMULATED)
    assert type(converter).__name__ == "Float8LinearConverter" and converter.enabled
    assert type(model.wide).__name__ == type(model.output).__name__ == "Float8Linear"
    assert type(model.small) is nn.Linear
    x = torch.randn(16, 32)
    for block in (plain, model):
        block(x).square().sum().backward()
    # e4m3 keeps 3 bits of mantissa: single products are off by up to 1/16.
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).norm() < 0.1 * p.grad.norm()
    assert not torch.equal(plain.wide.weight.grad, model.wide.weight.grad)
    converter.post_optimizer_hook([model])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_recipes_reach_torchao(recipe):
    import torch._inductor.config

    with torch._inductor.config.patch(emulate_precision_casts=False):
        converter, _, model = convert(*EMULATED, f"--quantize.linear.float8.recipe_name={recipe}")
        model(torch.randn(16, 32)).sum().backward()
        assert torch._inductor.config.emulate_precision_casts == (recipe == "rowwise")
    assert converter.config.emulate


def test_float8_all_gather_needs_sharded_data_parallelism():
    flags = [*GATHERED, "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"]
    with pytest.raises(ValueError, match="exclude each other, got recipe_name = 'rowwise'"):
        build(*flags, "--quantize.linear.float8.recipe_name", "rowwise")
    (alone,) = build(*flags).converters
    assert not alone.config.enable_fsdp_float8_all_gather and not alone.precompute_scale
    (sharded,) = build(*flags, n_ranks=2).converters
    assert sharded.config.enable_fsdp_float8_all_gather and sharded.precompute_scale


@needs_mx
@pytest.mark.parametrize("flags", [GATHERED, MX], ids=["float8 all-gather", "mx"])
def test_state_dicts_of_wrapped_weights_are_plain_and_live(flags):
    _, _, model = convert(*flags, n_ranks=2)
    assert type(model.wide.weight) is not nn.Parameter
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with torch.no_grad():
        model.wide.weight.fill_(3)
    assert state["wide.weight"].eq(3).all()
    model.wide.weight._precomputed_scale = torch.ones(())
    saved = {name: torch.full_like(value, 5) for name, value in state.items()}
    model.load_state_dict(saved)
    assert state["wide.weight"].eq(5).all()
    assert model.wide.weight._precomputed_scale is None or flags is MX


def test_auto_filter_leaves_small_layers_and_the_config_alone():
    config = ConfigManager().parse_args(EMULATED)
    config.quantize.linear.float8.filter_fqns = ["auto_filter_small_kn", "output"]
    (converter,) = converters_of(config).converters
    assert converter.filter_fqns == ["output"]
    assert config.quantize.linear.float8.filter_fqns == ["auto_filter_small_kn", "output"]
    model = Block()
    converter.convert(model)
    assert type(model.wide) is nn.Linear
    assert converter.filter_fn(nn.Linear(8192, 8192, device="meta"), "layers.0.wq")
    assert not converter.filter_fn(nn.Linear(8192, 8192, device="meta"), "output")


def test_mxfp8_on_an_old_torch_names_the_remedy(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(ValueError, match="newer than 2.11, got.*upgrade it"):
        build(*MX)


@needs_mx
def test_emulated_mxfp8_trains_on_cpu():
    pytest.importorskip("torchao.prototype.moe_training.config")
    _, plain, model = convert(*MX, dtype=torch.bfloat16)
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(model(x), plain(x), atol=0.1, rtol=0.1)
    assert not torch.equal(model.wide(x), plain.wide(x))
    assert torch.equal(model.output(x.repeat(1, 2)), plain.output(x.repeat(1, 2)))  # filtered
