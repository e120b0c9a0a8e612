"""Rows that pair fields of Hugging Face's (HF) config.json with our args; each is read and written.

A family's module has `hf_types`: model_type -> `HFType`, a table of these rows.
"""

import dataclasses
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchtitan.models.rope import RoPEScalingArgs

Config = Mapping[str, Any]

# Property that is compared -> the fields that it is computed from, which are not compared.
DERIVED = {
    "ffn_hidden_dim": ["hidden_dim", "multiple_of", "ffn_dim_multiplier"],
    "expert_hidden_dim": ["moe_inter_dim", "auto_scale_hidden_dim"],
    "attention_head_dim": ["head_dim"],
}
# Our field that may be None -> the property that then computes the value.
_COMPUTED = {fields[0]: derived for derived, fields in DERIVED.items()}

MOE = "moe_args."  # prefix of the fields of MoEArgs

# Allowed values: a range of integers, one of the types float, bool and str, or None for any value.
# Larger sizes must be mistakes; they are refused before memory is allocated.
Kind = range | type | None
SIZE, COUNT = range(1, 2**24 + 1), range(2**24 + 1)
_REQUIRED = object()
_SAME_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


class Row(Protocol):
    """Fields of HF's config and of our args that determine each other.

    fields: names of the HF fields. `write` is the inverse of `read`; `check` compares a config with the
    args that were read from it.
    """

    @property
    def fields(self) -> Collection[str]: ...
    def read(self, config: Config) -> dict[str, Any]: ...
    def check(self, config: Config, args: Any) -> None: ...
    def write(self, args: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Field:
    """A field of HF's config, and the field of our args with the same value.

    default: the value if a config lacks the field, or a function from the config to that value.
    from_hf: function from (value, config) to our value, if the values differ.
    to_hf: function from our args to the HF value, if it differs.
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
        """The names that HF has for this field."""
        return _SAME_FIELDS if self.hf in _SAME_FIELDS else (self.hf,)

    @property
    def fields(self) -> Collection[str]:
        return self.names + self.also

    def read(self, config: Config) -> dict[str, Any]:
        for name in self.names:
            if is_given(config, name):
                check_kind(config, name, self.kind)
                return {self.ours: self.from_hf(config[name], config)}
        return {self.ours: self.default(config) if callable(self.default) else self.default}

    def check(self, config: Config, args: Any) -> None:
        pass

    def write(self, args: Any) -> dict[str, Any]:
        if self.to_hf is not None:
            return {self.hf: self.to_hf(args)}
        computed = _COMPUTED.get(self.ours, self.ours)
        ours = computed if hasattr(args, computed) else self.ours
        return {self.hf: operator.attrgetter(ours)(args)}


@dataclass(frozen=True)
class Must:
    """A field that has one value in all models like ours: `value`, or what this function of our args returns.

    reason: ends the sentence that refuses other values. default: the value if a config lacks the field.
    """

    hf: str
    value: Any
    reason: str = ""
    default: Any = None

    @property
    def fields(self) -> Collection[str]:
        return (self.hf,)

    def read(self, config: Config) -> dict[str, Any]:
        return {}

    def check(self, config: Config, args: Any) -> None:
        expected = self._value(args)
        found = config[self.hf] if is_given(config, self.hf) else self.default
        if found is not None and found != expected:
            raise refusal(config, self.hf, self.reason or f"it must be {expected!r}")

    def write(self, args: Any) -> dict[str, Any]:
        value = self._value(args)
        return {} if value == self.default else {self.hf: value}

    def _value(self, args: Any) -> Any:
        return self.value(args) if callable(self.value) else self.value


@dataclass(frozen=True)
class RoPE:
    """RoPE's theta and the only kind of scaling that a family has, whose fields are `rows`.

    kind: rope_type, if scaled. default_theta: if a config lacks rope_theta.
    ours, cls: our field that holds an object with the rows' values; None if they are args themselves.
    unscaled: our fields and their values without scaling.
    """

    kind: str | None = None
    rows: tuple[Row, ...] = ()
    unscaled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ours: str | None = None
    cls: Callable[..., Any] | None = None
    default_theta: float = 10000.0

    fields = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def _scaling(self, config: Config) -> Config | None:
        table = rope_table(config)
        for place in (table, config):
            require(place, "partial_rotary_factor", [1], "whole heads are rotated")
        require(table, "rope_type", ["default", self.kind], "frequencies cannot be scaled that way")
        return None if table["rope_type"] == "default" else table

    def read(self, config: Config) -> dict[str, Any]:
        theta = {"rope_theta": rope_table(config).get("rope_theta", self.default_theta)}
        check_kind(theta, "rope_theta", float)
        if (table := self._scaling(config)) is None:
            return theta | self.unscaled
        values = take(table, self.rows)
        return theta | (values if self.ours is None else {self.ours: self.cls(**values)})

    def check(self, config: Config, args: Any) -> None:
        if (table := self._scaling(config)) is not None:
            for row in self.rows:
                row.check(table, args)

    def write(self, args: Any) -> dict[str, Any]:
        scaling = None
        if any(getattr(args, name) != value for name, value in self.unscaled.items()):
            holder = args if self.ours is None else getattr(args, self.ours)
            if isinstance(holder, RoPEScalingArgs):  # transformers warns of longer original lengths
                holder = holder.shortened(args.max_seq_len)
            scaling = {"rope_type": self.kind} | give(holder, self.rows)
        return {"rope_theta": args.rope_theta, "rope_scaling": scaling}


class HFType(NamedTuple):
    """A model_type of Hugging Face.

    name: prefix of HF's class names. rows: in addition to `ALL_TYPES`.
    args: our field -> value in all models of this type.
    defaults: HF field -> the value if a config lacks it, where rows have none.
    inside: model_types of multimodal configs whose text_config has this type.
    names, prefixes, left_out: for `CausalLMAdapter`: names of weights that do not follow from the args, or a
        function of the args that returns them, and `text_prefixes` and `ignored_hf_keys` of `KeyMapAdapter`.
    """

    name: str
    rows: tuple[Row, ...]
    args: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    inside: tuple[str, ...] = ()
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
TOP_K = Field("num_experts_per_tok", "moe_args.top_k")
SILU = Must("hidden_act", "silu", "feed-forwards are gated by SiLU")
SOFTMAX_ROUTER = {"moe_args.score_func": "softmax", "moe_args.score_before_experts": False}
SIGMOID_ROUTER = SOFTMAX_ROUTER | {"moe_args.score_func": "sigmoid"}
NO_SHARED_EXPERTS = {"moe_args.num_shared_experts": 0}

LLAMA3_ROPE = RoPE(
    "llama3",
    (
        Field("factor", "scaling_factor", float),
        Field("low_freq_factor", "low_freq_factor", float),
        Field("high_freq_factor", "high_freq_factor", float),
        Field("original_max_position_embeddings", "original_max_position_embeddings"),
    ),
    unscaled={"rope_scaling_args": None},
    ours="rope_scaling_args",
    cls=RoPEScalingArgs,
)


def yarn(fast: str, slow: str, *rows: Row, truncate: bool, default_theta: float = 10000.0) -> RoPE:
    """Return the row of a family that has YaRN's numbers in its own fields; fast, slow: two of them."""
    blend = f"this family blends frequencies with {truncate}"
    yarn_rows = (
        Field("factor", "rope_factor", float),
        Field("original_max_position_embeddings", "original_seq_len"),
        Field("beta_fast", fast, float, 32),
        Field("beta_slow", slow, float, 1),
        Must("truncate", truncate, blend, default=True),
        Must("attention_factor", None, "our models compute it from factor"),
    )
    unscaled = {"rope_factor": 1.0}
    return RoPE("yarn", yarn_rows + rows, unscaled, default_theta=default_theta)


def take(config: Config, rows: Iterable[Row]) -> dict[str, Any]:
    """Return our field -> value from a config. Raises ValueError for missing or impossible values."""
    values: dict[str, Any] = {}
    missing: list[str] = []
    for row in rows:
        is_field = isinstance(row, Field)
        is_present = is_field and any(is_given(config, name) for name in row.names)
        if is_field and row.default is _REQUIRED and not is_present:
            missing.append(row.hf)
        elif is_present or not missing:  # defaults may need the fields that are missing
            values |= row.read(config)
    if missing:
        raise ValueError(f"The Hugging Face config lacks {', '.join(missing)}; add them")
    return values


def give(args: Any, rows: Iterable[Row]) -> dict[str, Any]:
    """Return HF field -> value: the inverse of `take`."""
    return {name: value for row in rows for name, value in row.write(args).items()}


def rope_table(config: Config) -> dict[str, Any]:
    """Return rope_parameters from either spelling; ValueError if a config has both and they differ.

    transformers 5 reads rope_scaling and then ignores rope_theta; transformers 4 reads only rope_scaling.
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
            "rope_parameters says otherwise; keep rope_parameters and remove rope_scaling",
        )
    if theta is not None and first.get("rope_theta") != theta:
        raise refusal(config, "rope_theta", f"the RoPE table has {first['rope_theta']}")
    return {name: value for name, value in first.items() if value is not None}


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
    """Return False for null and an empty list, too, which stand for the default in HF's configs."""
    return config.get(name) is not None and config[name] != []
