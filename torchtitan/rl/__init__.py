"""Reinforcement learning on the training engine; `torchtitan.experiments.rl` has the same modules.

This package imports nothing: import from its modules, such as `torchtitan.rl.types`.
"""
