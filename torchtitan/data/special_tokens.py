"""The special tokens of Hugging Face's tokenizer files."""

# Keys of tokenizer_config.json that name one special token each, in the order of the ids of new tokens.
SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
