"""Low-rank adapters beside frozen weights (LoRA), in every layout, and their files."""
