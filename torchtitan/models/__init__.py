"""Model families. Each is a folder with a flavor table and a `get_train_spec()`."""

_supported_models: frozenset[str] = frozenset({"llama3", "qwen3"})
