"""Saving and loading a run. The entry point is `manager.CheckpointManager`.

`selection` chooses the checkpoint to load, `saver` writes one, `retention` removes old ones. `states`
and `weights` are the contents of a checkpoint, and `run_record` the settings of the run that wrote it.
`folder` describes a step folder on disk. `dcp` and `hf` (with `hf_assets`) read and write the two
formats, and `conversion` serves the scripts that convert. `stream` sends the weights to a server.
"""
