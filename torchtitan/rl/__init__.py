"""Reinforcement learning on the training engine; `torchtitan.experiments.rl` has the same modules.

Nothing is imported here: take what you need from the modules, such as `torchtitan.rl.types`.
"""
