"""Train specs outside of the supported models; `model.name` finds them by these names."""

_supported_experiments: frozenset[str] = frozenset({"rl_toy"})
