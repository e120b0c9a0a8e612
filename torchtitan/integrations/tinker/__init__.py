"""A policy behind Tinker's HTTP interface; `python -m torchtitan.rl.serve` starts it."""
