"""Translates `CausalLMArgs` from and to Hugging Face (HF): layer kinds in config.json, names of weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.models.causal_lm import FULL_ATTENTION, CausalLM, CausalLMArgs, LayerKind
from torchtitan.models.family import build_decoder_train_spec
from torchtitan.models.hf_adapter import CORRECTION_BIAS, HFAdapter, HFKeyMap
from torchtitan.models.hf_config import args_of, hf_types
from torchtitan.models.hf_fields import (
    COUNT,
    KV_HEADS,
    ORIGINAL_LENGTH,
    SIZE,
    TOP_K,
    Config,
    Field,
    HFType,
    Row,
    check_kind,
    read_rope,
    refusal,
    require,
    rope_table,
    write_rope,
)
from torchtitan.models.rope import LongRoPE, RoPEArgs
from torchtitan.protocols.train_spec import TrainSpec

SLIDING_ATTENTION, LINEAR_ATTENTION = "sliding_attention", "linear_attention"
NO_ROPE = ", no RoPE"  # suffix of the names of layer kinds without RoPE

HEAD_DIM = Field(
    "head_dim", "head_dim", default=lambda c: c["hidden_size"] // c["num_attention_heads"]
)
# Rows for biases in all four linear layers of attention.
BIASES = (
    Field("attention_bias", "qkv_bias", bool, False),
    Field("attention_bias", "output_bias", bool, False),
)
DENSE: tuple[Row, ...] = (KV_HEADS, HEAD_DIM, Field("intermediate_size", "hidden_dim"))


def every(
    n: int, field: str | None = None, others: str = SLIDING_ATTENTION
) -> Callable[[Config], list[str]]:
    """Return a function for `Layers.types`: every n-th layer has full attention.

    field: the HF field that overrides n. others: the type of all other layers.
    """

    def types(config: Config) -> list[str]:
        step = config.get(field) or n if field else n
        local = range(1, config["num_hidden_layers"] + 1)
        return [others if layer % step else FULL_ATTENTION for layer in local]

    return types


def has_rope(config: Config) -> list[int]:
    """Return a list with 1 for each layer with RoPE and 0 for each layer without."""
    if given := config.get("no_rope_layers"):
        return given
    interval = config.get("no_rope_layer_interval") or 4
    return [int((n + 1) % interval != 0) for n in range(config["num_hidden_layers"])]


def _dense_layers(config: Config) -> tuple[int, ...]:
    """Return the indices of the layers without experts, given by two fields of Qwen's config."""
    only, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = range(config["num_hidden_layers"])
    return tuple(n for n in layers if n in only or (n + 1) % step != 0)


# Rows for `dense_layers`: either the first n layers are dense, or Qwen's two fields choose them.
FIRST_DENSE = Field(
    "first_k_dense_replace",
    "dense_layers",
    COUNT,
    (),
    from_hf=lambda n, _: tuple(range(n)),
    to_hf=lambda args: len(args.dense_layers),
)
QWEN_DENSE = Field(
    "mlp_only_layers",
    "dense_layers",
    None,
    _dense_layers,
    from_hf=lambda _, config: _dense_layers(config),
    to_hf=lambda args: list(args.dense_layers),
    also=("decoder_sparse_step",),
)

QWEN_EXPERTS: tuple[Row, ...] = (
    Field("num_experts", "moe_args.num_experts"),
    TOP_K,
    Field("moe_intermediate_size", "moe_inter_dim"),
    Field("shared_expert_intermediate_size", "moe_args.shared_expert_dim"),
)


@dataclass(frozen=True)
class Layers(Row):
    """Translates HF's layer types, windows and RoPE to `layer_types`, `layer_kinds` and `rope_theta`.

    types: function from a config without layer_types to its layer_types. None: the model_type has no such
        field, and all layers share one window. window: the value if a config lacks sliding_window.
    is_switched: windows are used only if use_sliding_window is true.
    lacks_rope: the field no_rope_layers may turn RoPE off in some layers.
    theta, share: values if a config lacks rope_theta or partial_rotary_factor; share may also be a function of
        the config.
    thetas: layer type -> theta if a config lacks it; only for families with one RoPE table per layer type,
        where the older field rope_scaling holds the table of full-attention layers.
    has_query_scale: the RoPE table also has the fields of `query_scale`.
    """

    types: Callable[[Config], list[str]] | None = None
    window: int | None = None
    is_switched: bool = False
    lacks_rope: bool = False
    theta: float = 10000.0
    share: float | Callable[[Config], float] = 1.0
    thetas: Mapping[str, float] | None = None
    has_query_scale: bool = False

    @property
    def fields(self) -> Iterable[str]:
        names = (
            "rope_theta rope_scaling rope_parameters partial_rotary_factor sliding_window "
            + ORIGINAL_LENGTH
        )
        names += " layer_types full_attention_interval sliding_window_pattern" if self.types else ""
        names += " use_sliding_window max_window_layers" if self.is_switched else ""
        names += " no_rope_layers no_rope_layer_interval" if self.lacks_rope else ""
        return (names + (" rope_local_base_freq" if self.thetas else "")).split()

    def read(self, config: Config) -> dict[str, Any]:
        n_layers = config["num_hidden_layers"]
        window = config.get("sliding_window", self.window) or None
        if window is not None:
            check_kind({"sliding_window": window}, "sliding_window", SIZE)
        if self.is_switched and not config.get("use_sliding_window"):
            window = None
            if SLIDING_ATTENTION in (config.get("layer_types") or ()):
                raise refusal(config, "use_sliding_window", "layer_types has layers with windows")
        if self.types is None:
            types = [SLIDING_ATTENTION if window else FULL_ATTENTION] * n_layers
        else:
            types = config.get("layer_types") or self.types(config)
        if window is None and self.thetas is None:
            types = [FULL_ATTENTION if name == SLIDING_ATTENTION else name for name in types]
        known = {FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION}
        if len(types) != n_layers or not known.issuperset(types):
            raise refusal(
                config, "layer_types", f"it must have {n_layers} of {', '.join(sorted(known))}"
            )
        tables = self._tables(config)
        share = self.share(config) if callable(self.share) else self.share
        ropes = {name: read_rope(tables[name], config, share) for name in tables}
        head_dim = HEAD_DIM.read(config)["head_dim"]
        if any(rope.size(head_dim) % 2 for rope in ropes.values()):
            name = "partial_rotary_factor"
            raise refusal(config, name, f"it must rotate an even number of {head_dim} dimensions")
        theta = ropes[FULL_ATTENTION].theta
        kinds, names = {}, []
        rotations = has_rope(config) if self.lacks_rope else [1] * n_layers
        if len(rotations) != n_layers:
            raise refusal(config, "no_rope_layers", f"it must have {n_layers} numbers")
        for name, rotates in zip(types, rotations, strict=True):
            rope = ropes.get(name, ropes[FULL_ATTENTION])
            if rope.theta == theta:
                rope = RoPEArgs(None, rope.share, rope.proportional, rope.scaling, rope.magnitude)
            kind = LayerKind(rope, window if name == SLIDING_ATTENTION else None)
            if name == LINEAR_ATTENTION:
                kind = LayerKind(None, mixer="gated_delta")
            elif not rotates:
                name, kind = name + NO_ROPE, LayerKind(None, kind.window)
            kinds[name] = kind
            names.append(name)
        values = {"layer_kinds": kinds, "rope_theta": theta}
        values["layer_types"] = tuple(names) if len(kinds) > 1 else ()
        if any(kind.window for kind in kinds.values()):
            values["attn_type"] = "flex"  # sdpa has no windows
        table = tables[FULL_ATTENTION]
        if self.has_query_scale and table.get("llama_4_scaling_beta"):
            values["query_scale"] = table["llama_4_scaling_beta"]
            values["query_scale_length"] = table[ORIGINAL_LENGTH]
        return values

    def _tables(self, config: Config) -> dict[str, Config]:
        """Return layer type -> its RoPE table, which always has rope_theta."""
        name = next((n for n in ("rope_parameters", "rope_scaling") if config.get(n)), "")
        given = config.get(name) or {}
        is_nested = isinstance(given, Mapping) and any(
            isinstance(t, Mapping) for t in given.values()
        )
        if self.thetas is None:
            if is_nested:
                raise refusal(config, name, "all layers must share one RoPE table")
            return {FULL_ATTENTION: {"rope_theta": self.theta} | rope_table(config)}
        if is_nested:
            tables = {
                name: {"rope_theta": theta} | rope_table({"rope_parameters": given.get(name)})
                for name, theta in self.thetas.items()
            }
            for table in tables.values():
                if table["rope_type"] == "default":  # transformers rotates whole heads
                    require(table, "partial_rotary_factor", [1], "default RoPE rotates whole heads")
            return tables
        if name == "rope_parameters":  # transformers requires one table per layer type
            raise refusal(config, name, f"it must have tables for {' and '.join(self.thetas)}")
        full = {"rope_theta": self.thetas[FULL_ATTENTION]} | rope_table(config)
        local = self.thetas[SLIDING_ATTENTION]
        if local == self.thetas[FULL_ATTENTION] != full["rope_theta"]:
            # transformers 5 uses rope_theta for full attention only
            kinds = " and ".join(self.thetas)
            raise refusal(config, "rope_theta", f"rope_parameters must have tables for {kinds}")
        local = config.get("rope_local_base_freq", local)
        return {
            FULL_ATTENTION: full,
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": local},
        }

    def write(self, args: CausalLMArgs) -> dict[str, Any]:
        named = [args.kind_of(n) for n in range(args.n_layers)]
        windows = [kind.window for _, kind in named if kind.window]
        config: dict[str, Any] = {}
        if windows or self.types or self.window:
            config["sliding_window"] = windows[0] if windows else None
        if self.types:
            config["layer_types"] = [name.removesuffix(NO_ROPE) for name, _ in named]
        if self.is_switched:
            config["use_sliding_window"] = bool(windows)
        if self.lacks_rope:
            config["no_rope_layers"] = [int(kind.rope is not None) for _, kind in named]
        ropes = {name: kind.rope for name, kind in named if kind.rope is not None}
        if self.thetas is not None:
            of_types = {name: RoPEArgs(theta) for name, theta in self.thetas.items()} | ropes
            theta, length = args.rope_theta, args.max_seq_len
            tables = {name: write_rope(rope, theta, length) for name, rope in of_types.items()}
            for name, rope in of_types.items():
                if rope.share != 1:
                    tables[name]["partial_rotary_factor"] = rope.share
            return config | {"rope_parameters": tables}
        rope = next(iter(ropes.values()), RoPEArgs())
        table = write_rope(rope, args.rope_theta, args.max_seq_len)
        theta = table.pop("rope_theta")
        if self.has_query_scale and args.query_scale:
            table["llama_4_scaling_beta"] = args.query_scale
        if rope.share != 1 or self.share != 1:
            config["partial_rotary_factor"] = rope.share
        if isinstance(rope.scaling, LongRoPE):
            config[ORIGINAL_LENGTH] = rope.scaling.original_seq_len
        scaling = None if table["rope_type"] == "default" else table
        return config | {"rope_theta": theta, "rope_scaling": scaling}


# Prefixes of the text model's names in multimodal files, and patterns for names of vision parts.
MULTIMODAL = ("model.language_model.", "language_model.")
VISION = (r"(model\.)?(vision_tower|vision_model|multi_modal_projector|visual)\.",)
_BLOCK_SPARSE = "model.layers.{}.block_sparse_moe"
# Names of routers and experts in files of Mixtral and MiniMax.
BLOCK_SPARSE_MOE: HFKeyMap = {
    f"{_BLOCK_SPARSE}.gate.weight": "layers.{}.moe.router.gate.weight",
    **{
        f"{_BLOCK_SPARSE}.experts.{{}}.{name}.weight": f"layers.{{}}.moe.experts.{name}"
        for name in ("w1", "w3", "w2")
    },
}


class CausalLMAdapter(HFAdapter):
    """The adapter of `CausalLMArgs`. `HFType.names` takes precedence over names that follow from the args."""

    def __init__(self, model_args: CausalLMArgs, hf_assets_path: str | None):
        _, hf_type = hf_types()[model_args.hf_type]
        names = hf_type.names
        self.own_names = dict(names(model_args) if callable(names) else names)
        if model_args.moe_args.score_func == "sigmoid":
            self.own_names |= CORRECTION_BIAS
        self.text_prefixes, self.ignored_hf_keys = hf_type.prefixes, hf_type.left_out
        super().__init__(model_args, hf_assets_path)


# ---- families ----


def sizes(
    dim: int, n_layers: int, hidden_dim: int, n_heads: int, n_kv_heads: int, **others: Any
) -> dict[str, Any]:
    """Return the config.json fields of these sizes, and the fields in `others`."""
    return {
        "hidden_size": dim,
        "num_hidden_layers": n_layers,
        "intermediate_size": hidden_dim,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        **others,
    }


SMALL: dict[str, Any] = {"vocab_size": 2048, "head_dim": 32}  # sizes of test flavors


def train_spec_of(
    types: Mapping[str, HFType], configs: Mapping[str, Config]
) -> Callable[[], TrainSpec]:
    """Return a family's `get_train_spec`. configs: flavor -> the fields of its config.json."""
    flavors = {
        flavor: args_of(config, types[config["model_type"]], CausalLMArgs)
        for flavor, config in configs.items()
    }
    return lambda: build_decoder_train_spec(CausalLM, flavors, CausalLMAdapter)
