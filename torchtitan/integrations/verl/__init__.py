"""The engine inside verl 0.9.1, through verl's public plug-in points; see docs/verl.md.

`import verl` loads `plugin`. `config` turns verl's settings into a `JobConfig`, `samples` turns
verl's batches into packed rows, `engine` has the engines for language models and critics, and
`deltas` finds changed weights. A CPU platform and a rollout for it are in examples/verl.
"""
