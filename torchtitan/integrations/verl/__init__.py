"""The engine inside verl 0.9.1, through verl's public plug-in points; see docs/verl.md.

`plugin` is what verl loads when it is imported, `platform` a CPU for verl's device layer, `config`
turns verl's settings into a `JobConfig`, `samples` its batches into rows, and `engine` has the
engines for language models and critics.
"""
