"""The engine inside verl 0.9.1, through verl's public plug-in points; see docs/verl.md.

verl loads `plugin` when it is imported. `platform` makes the CPU a device of verl. `config` turns
verl's settings into a `JobConfig`, `samples` turns its batches into packed rows, and `engine` has the
engines for language models and critics. `rollout` and `sampler` generate, and `deltas` finds the
weights that changed.
"""
