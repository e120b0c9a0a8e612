"""Saving and loading a run. The entry point is `manager.CheckpointManager`.

`selection` chooses the checkpoint to load, `retention` removes old ones, `states` holds the contents
of a checkpoint, `background` and `staging` save while training goes on, `folder` describes a step
folder on disk. `dcp` and `hf` read and write the two formats, `stream` sends the weights to a server.
"""
