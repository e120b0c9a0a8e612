"""Generation with a decoder: `kv_cache` and `sampling`."""
