"""Model families. Each is a folder with a flavor table and a `get_train_spec()`."""

_supported_models: frozenset[str] = frozenset(
    {"deepseek_v3", "gpt_oss", "llama3", "llama4", "qwen3"}
)
