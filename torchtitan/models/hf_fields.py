"""Rows that translate fields of Hugging Face's (HF) config.json to fields of our model args, and back.

A family's module has a dict `hf_types`: model_type -> `HFType`, which holds the rows of that model_type.
"""

import dataclasses
import math
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.models.rope import (
    LinearRoPE,
    LongRoPE,
    RoPEArgs,
    RoPEScalingArgs,
    YaRNArgs,
    yarn_mscale,
)

Config = Mapping[str, Any]

# A property that `differing` compares -> the fields it is computed from, which are not compared.
DERIVED = {
    "ffn_hidden_dim": ["hidden_dim", "multiple_of", "ffn_dim_multiplier"],
    "expert_hidden_dim": ["moe_inter_dim", "auto_scale_hidden_dim"],
    "attention_head_dim": ["head_dim"],
}
# Our field that may be None -> the property that computes its value.
_COMPUTED = {fields[0]: derived for derived, fields in DERIVED.items()}

MOE = "moe_args."  # prefix of the fields of MoEArgs

# Allowed values: a range of integers, one of the types float, bool and str, or None for any value.
# Sizes above 2**24 must be mistakes; they are refused before memory is allocated.
Kind = range | type | None
SIZE, COUNT = range(1, 2**24 + 1), range(2**24 + 1)
_REQUIRED = object()
_SAME_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


class Row:
    """Fields of HF's config and of our args that determine each other.

    fields: names of the HF fields. `read` returns our field -> value; `write` returns HF field -> value.
    `check` raises ValueError if a config contradicts the args that were read from it.
    """

    fields: Collection[str]

    def read(self, config: Config) -> dict[str, Any]:
        return {}

    def check(self, config: Config, args: Any) -> None:
        pass

    def write(self, args: Any) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Field(Row):
    """A field of HF's config, and the field of our args with the same value.

    default: our value if a config lacks the field, or a function from the config to our value.
    from_hf: function from (value, config) to our value, if the values differ.
    to_hf: function from our args to the HF value, if the values differ.
    also: other HF fields that `default` or `from_hf` reads.
    """

    hf: str
    ours: str
    kind: Kind = SIZE
    default: Any = _REQUIRED
    from_hf: Callable[[Any, Config], Any] = lambda value, _: value
    to_hf: Callable[[Any], Any] | None = None
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All HF names of this field; `hf` is the name for export."""
        return _SAME_FIELDS if self.hf in _SAME_FIELDS else (self.hf,)

    @property
    def fields(self) -> Collection[str]:
        return self.names + self.also

    def is_missing(self, config: Config) -> bool:
        has_default = self.default is not _REQUIRED
        return not has_default and not any(is_given(config, name) for name in self.names)

    def read(self, config: Config) -> dict[str, Any]:
        for name in self.names:
            if is_given(config, name):
                check_kind(config, name, self.kind)
                return {self.ours: self.from_hf(config[name], config)}
        return {self.ours: self.default(config) if callable(self.default) else self.default}

    def write(self, args: Any) -> dict[str, Any]:
        if self.to_hf is not None:
            return {self.hf: self.to_hf(args)}
        computed = _COMPUTED.get(self.ours, self.ours)
        ours = computed if hasattr(args, computed) else self.ours
        return {self.hf: operator.attrgetter(ours)(args)}


@dataclass(frozen=True)
class Must(Row):
    """An HF field that must have one value, given our args: `value`, or the result of the function value(args).

    reason: the end of the error message for other values. default: the value if a config lacks the field.
    is_written: exports contain the field.
    """

    hf: str
    value: Any
    reason: str = ""
    default: Any = None
    is_written: bool = True

    @property
    def fields(self) -> Collection[str]:  # type: ignore[override]
        return (self.hf,)

    def check(self, config: Config, args: Any) -> None:
        expected = self._value(args)
        found = config[self.hf] if is_given(config, self.hf) else self.default
        if found is not None and found != expected:
            raise refusal(config, self.hf, self.reason or f"it must be {expected!r}")

    def write(self, args: Any) -> dict[str, Any]:
        return {self.hf: self._value(args)} if self.is_written else {}

    def _value(self, args: Any) -> Any:
        return self.value(args) if callable(self.value) else self.value


class HFType(NamedTuple):
    """How configs and weights of one Hugging Face model_type map to ours.

    name: prefix of HF's class names. rows: the type's rows, used in addition to `ALL_TYPES`.
    args: our field -> its value in all models of this type.
    defaults: HF field -> its value if a config lacks the field; takes precedence over a row's default.
    inside: model_types of multimodal configs whose text_config has this type.
    aliases: other model_types that are read as this type.
    names: the table of HF names that do not follow from the args, or a function from the args to it.
    prefixes, left_out: the `text_prefixes` and `ignored_hf_keys` of the `CausalLMAdapter`.
    """

    name: str
    rows: tuple[Row, ...]
    args: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    inside: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    names: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = {}
    prefixes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


ALL_TYPES: tuple[Row, ...] = (
    Field("hidden_size", "dim"),
    Field("num_hidden_layers", "n_layers", range(1, 1001)),
    Field("num_attention_heads", "n_heads"),
    Field("vocab_size", "vocab_size"),
    Field("rms_norm_eps", "norm_eps", float),
    Field("max_position_embeddings", "max_seq_len", range(1, 2**31)),
    Field("tie_word_embeddings", "enable_weight_tying", bool, False),
)
KV_HEADS = Field(
    "num_key_value_heads",
    "n_kv_heads",
    default=lambda config: config["num_attention_heads"],
    to_hf=lambda args: args.n_heads if args.n_kv_heads is None else args.n_kv_heads,
)
NO_JITTER = Must("router_jitter_noise", 0.0, "a router's input has no noise in training here")
TOP_K = Field("num_experts_per_tok", "moe_args.top_k")
SILU = Must("hidden_act", "silu", "feed-forwards are gated by SiLU")
SOFTMAX_ROUTER = {"moe_args.score_func": "softmax", "moe_args.score_before_experts": False}
SIGMOID_ROUTER = SOFTMAX_ROUTER | {"moe_args.score_func": "sigmoid"}
NO_SHARED_EXPERTS = {"moe_args.num_shared_experts": 0}
ROUTER_GROUPS = (
    Field(
        "n_group",
        "moe_args.num_expert_groups",
        default=None,
        from_hf=lambda n, _: None if n == 1 else n,
        to_hf=lambda args: args.moe_args.num_expert_groups or 1,
    ),
    Field(
        "topk_group",
        "moe_args.num_limited_groups",
        default=None,
        from_hf=lambda n, config: None if config.get("n_group") in (None, 1) else n,
        to_hf=lambda args: args.moe_args.num_limited_groups or 1,
    ),
)


def each_layer(value: Callable[[Any, int], Any]) -> Callable[[Any], list[Any]]:
    """Return a function for `Must.value`: our args -> the list of value(our args, index) for every layer."""
    return lambda args: [value(args, n) for n in range(args.n_layers)]


def take(config: Config, rows: Iterable[Row]) -> dict[str, Any]:
    """Return our field -> value from a config. Raises ValueError for missing or impossible values."""
    found, missing = {}, []
    for row in rows:
        if isinstance(row, Field) and row.is_missing(config):
            missing.append(row.hf)
        elif not missing or isinstance(row, Field):  # other rows might read a missing field
            found |= row.read(config)
    if missing:
        raise ValueError(f"The Hugging Face config lacks {', '.join(missing)}; add these fields")
    return found


def give(args: Any, rows: Iterable[Row]) -> dict[str, Any]:
    """Return HF field -> value: the inverse of `take`."""
    return {name: value for row in rows for name, value in row.write(args).items()}


def check_kind(config: Config, name: str, kind: Kind) -> None:
    value = config[name]
    if isinstance(kind, range):
        rule = f"it must be an integer from {kind[0]} to {kind[-1]}"
        is_right = type(value) is int and value in kind
    elif kind is float:
        rule = "it must be a number, not negative and below 1e12"
        is_right = type(value) in (int, float) and 0 <= value < 1e12
    else:
        rule = "it must be true or false" if kind is bool else "it must be text"
        is_right = kind is None or type(value) is kind
    if not is_right:
        raise refusal(config, name, rule)


def require(config: Config, name: str, allowed: Collection[Any], reason: str) -> None:
    if config.get(name) is not None and config[name] not in allowed:
        raise refusal(config, name, reason)


def refusal(config: Config, name: str, reason: str) -> ValueError:
    return ValueError(
        f"No model here matches the Hugging Face config: it has {name} = "
        f"{reprlib.repr(config.get(name))}, but {reason}"
    )


def is_given(config: Config, name: str) -> bool:
    """Return True if a config has the field. null and [] count as missing: HF uses them for the default."""
    return config.get(name) is not None and config[name] != []


# ---- RoPE ----

ORIGINAL_LENGTH = "original_max_position_embeddings"
_max_length = operator.itemgetter("max_position_embeddings")
# rope_type -> our class, and the rows of the fields of this class.
_SCALINGS: dict[str, tuple[type, tuple[Row, ...]]] = {
    "linear": (LinearRoPE, (Field("factor", "factor", float),)),
    "llama3": (
        RoPEScalingArgs,
        (
            Field("factor", "scaling_factor", float),
            Field("low_freq_factor", "low_freq_factor", float),
            Field("high_freq_factor", "high_freq_factor", float),
            Field(ORIGINAL_LENGTH, ORIGINAL_LENGTH),
        ),
    ),
    "yarn": (
        YaRNArgs,
        (
            Field("factor", "factor", float, lambda t: _max_length(t) / t[ORIGINAL_LENGTH]),
            Field(ORIGINAL_LENGTH, "original_seq_len", default=_max_length),
            Field("beta_fast", "beta_fast", float, 32),
            Field("beta_slow", "beta_slow", float, 1),
            Field("truncate", "truncate", bool, True),
        ),
    ),
    "longrope": (
        LongRoPE,
        (
            Field("short_factor", "short_factors", None, from_hf=lambda x, _: tuple(x)),
            Field("long_factor", "long_factors", None, from_hf=lambda x, _: tuple(x)),
            Field(ORIGINAL_LENGTH, "original_seq_len"),
        ),
    ),
}


def rope_table(config: Config) -> dict[str, Any]:
    """Return the RoPE table in rope_parameters or rope_scaling; ValueError if both exist and differ.

    If a config has both, transformers 5 ignores rope_parameters; transformers 4 always ignores it.
    """
    theta = config.get("rope_theta")
    if theta is not None:
        check_kind(config, "rope_theta", float)
    spellings = {}
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            raise refusal(config, name, "it must be a table")
        if config.get(name):
            rope = spellings[name] = dict(config[name])
            rope.setdefault("rope_type", rope.pop("type", "default"))
            rope.pop("type", None)
            if theta is not None:
                rope.setdefault("rope_theta", theta)
    first = next(iter(spellings.values()), {"rope_type": "default", "rope_theta": theta})
    if any(rope != first for rope in spellings.values()):
        raise refusal(
            config,
            "rope_scaling",
            "rope_parameters differs; keep rope_parameters and remove rope_scaling",
        )
    if theta is not None and first.get("rope_theta") != theta:
        raise refusal(config, "rope_theta", f"the RoPE table has {first['rope_theta']}")
    return {name: value for name, value in first.items() if value is not None}


def read_rope(table: Config, config: Config, share: float = 1.0) -> RoPEArgs:
    """Return the `RoPEArgs` of a `rope_table`. share: the default of partial_rotary_factor.

    Raises ValueError for an unsupported rope_type, such as "dynamic", whose frequencies depend on the batch.
    """
    table = {"max_position_embeddings": config["max_position_embeddings"]} | dict(table)
    if config.get(ORIGINAL_LENGTH) is not None:  # as in transformers, not the table's value
        table[ORIGINAL_LENGTH] = config[ORIGINAL_LENGTH]
    # Older LongRoPE configs have the rope_type "su" or "yarn".
    kind = "longrope" if "short_factor" in table else table["rope_type"]
    for place in (config, table):
        if place.get("partial_rotary_factor") is not None:
            check_kind(place, "partial_rotary_factor", float)
            share = place["partial_rotary_factor"]
    check_kind(table, "rope_theta", float)
    if kind in ("default", "proportional"):
        return RoPEArgs(table["rope_theta"], share, proportional=kind == "proportional")
    if kind not in _SCALINGS:
        known = ", ".join(["default", "proportional", *_SCALINGS])
        raise refusal(table, "rope_type", f"known are {known}")
    cls, rows = _SCALINGS[kind]
    scaling = cls(**take(table, rows))
    magnitude = table.get("attention_factor")
    if magnitude is None:
        magnitude = _magnitude(table, scaling)
    return RoPEArgs(table["rope_theta"], share, scaling=scaling, magnitude=magnitude)


def write_rope(rope: RoPEArgs, theta: float, max_length: int, **more: Any) -> dict[str, Any]:
    """Return the RoPE table. theta: used if rope.theta is None. more: further fields of a table with scaling."""
    table: dict[str, Any] = {"rope_type": "proportional" if rope.proportional else "default"}
    for kind, (cls, rows) in _SCALINGS.items():
        if isinstance(rope.scaling, cls):
            table = {"rope_type": kind} | give(rope.scaling, rows) | more
    if rope.magnitude != _magnitude(table | {"max_position_embeddings": max_length}, rope.scaling):
        table["attention_factor"] = rope.magnitude
    return table | {"rope_theta": theta if rope.theta is None else rope.theta}


def _magnitude(table: Config, scaling: Any) -> float:
    """Return the factor on cosines and sines for a table without attention_factor."""
    if isinstance(scaling, YaRNArgs):
        mscale, of_all = table.get("mscale"), table.get("mscale_all_dim")
        if mscale and of_all:
            return yarn_mscale(scaling.factor, mscale) / yarn_mscale(scaling.factor, of_all)
        return yarn_mscale(scaling.factor)
    if not isinstance(scaling, LongRoPE):
        return 1.0
    length = scaling.original_seq_len
    factor = table.get("factor") or table["max_position_embeddings"] / length
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0


@dataclass(frozen=True)
class RoPE(Row):
    """Translates the RoPE of args without `layer_kinds`.

    of: function from our args to their `RoPEArgs`. kind: the only rope_type accepted besides "default".
    ours: field of the scaling class -> our field, or the name of our field that holds the whole scaling.
    unscaled: our field -> its value without scaling. rows: rows of the RoPE table's further fields.
    theta: the value if a config lacks rope_theta.
    """

    of: Callable[[Any], RoPEArgs] = lambda _: RoPEArgs()
    kind: str | None = None
    ours: Mapping[str, str] | str = ""
    unscaled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    theta: float = 10000.0

    fields = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def _read(self, config: Config) -> tuple[dict[str, Any], RoPEArgs]:
        table = {"rope_theta": self.theta} | rope_table(config)
        require(table, "rope_type", ["default", self.kind], "frequencies cannot be scaled that way")
        return table, read_rope(table, config)

    def read(self, config: Config) -> dict[str, Any]:
        table, rope = self._read(config)
        values = {"rope_theta": rope.theta, **self.unscaled}
        if rope.scaling is None:
            return values
        if isinstance(self.ours, str):
            return values | {self.ours: rope.scaling}
        numbers = {ours: getattr(rope.scaling, name) for name, ours in self.ours.items()}
        return values | numbers | take(table, self.rows)

    def check(self, config: Config, args: Any) -> None:
        table, rope = self._read(config)
        if rope.share != 1:
            raise refusal(
                {"partial_rotary_factor": rope.share},
                "partial_rotary_factor",
                "whole heads are rotated",
            )
        expected = dataclasses.replace(self.of(args), theta=rope.theta)
        if rope.scaling is not None and rope != expected:
            raise refusal({"rope_scaling": table}, "rope_scaling", f"this family has {expected}")

    def write(self, args: Any) -> dict[str, Any]:
        rope, length, scaling = self.of(args), args.max_seq_len, None
        if isinstance(
            rope.scaling, RoPEScalingArgs
        ):  # transformers warns if the original length is not below max_position_embeddings
            rope = dataclasses.replace(rope, scaling=rope.scaling.shortened(length))
        if any(getattr(args, name) != value for name, value in self.unscaled.items()):
            scaling = write_rope(rope, args.rope_theta, length, **give(args, self.rows))
            del scaling["rope_theta"]
        return {"rope_theta": args.rope_theta, "rope_scaling": scaling}


LLAMA3_ROPE = RoPE(
    lambda args: RoPEArgs(scaling=args.rope_scaling_args),
    kind="llama3",
    ours="rope_scaling_args",
    unscaled={"rope_scaling_args": None},
)
