"""Continuing token sequences with a decoder: `kv_cache` and `sampling`."""
