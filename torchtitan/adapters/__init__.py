"""Low-rank adapters beside frozen weights (LoRA), for every parallel layout, and their files."""
