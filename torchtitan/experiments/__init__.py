"""Train specs that are not part of the supported surface, by the name they are looked up with."""

_supported_experiments: frozenset[str] = frozenset({"rl_toy"})
