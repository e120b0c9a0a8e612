"""Saving and loading a run. The entry point is `manager.CheckpointManager`.

`selection` chooses the checkpoint to load, `saver` writes one, `retention` removes old ones. `states`
and `weights` are the contents of a checkpoint, `folder` describes a step folder on disk, `dcp` and
`hf` read and write the two formats. `stream` sends the weights to a server.
"""
