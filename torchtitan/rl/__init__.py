"""Reinforcement learning on the training engine; `torchtitan.experiments.rl` is the same package.

Nothing is imported here: take what you need from the modules, such as `torchtitan.rl.types`.
"""
