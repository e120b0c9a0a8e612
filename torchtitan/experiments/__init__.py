"""Models that are not officially supported. `model.name` may be one of these."""

_supported_experiments: frozenset[str] = frozenset({"rl_toy"})
