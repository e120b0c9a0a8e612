"""Saving and loading a run; `manager.CheckpointManager` is the way in.

`selection` says which checkpoint is loaded, `saving` how one is copied and written, `retention`
which ones are kept, `folder` what a step folder is on disk, `states` what goes into it, `dcp` and
`hf` read and write the two formats, `stream` hands the weights to a server.
"""
