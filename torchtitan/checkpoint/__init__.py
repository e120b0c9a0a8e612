"""Saving and loading a run. The entry point is `manager.CheckpointManager`.

`selection` chooses the checkpoint to load, `saver` writes checkpoints, `retention` removes old ones.
`states` holds a checkpoint's contents, `run_record` the writing run's settings, `folder` its files.
`dcp` and `hf` (with `hf_assets`) read and write the two formats. `conversion` is for scripts; `stream`
sends weights to a server.
"""
