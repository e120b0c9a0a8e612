"""The engine inside verl 0.9.1, through verl's public plug-in points; see docs/verl.md.

verl loads `plugin` when it is imported. `config` turns verl's settings into a `JobConfig`, `samples`
turns its batches into packed rows, `engine` has the engines for language models and critics, and
`deltas` finds the weights that changed. A CPU platform and a rollout for it are in examples/verl.
"""
