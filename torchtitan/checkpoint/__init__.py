"""Saving and loading a run. The entry point is `manager.CheckpointManager`.

`selection` chooses the checkpoint to load, `saver` writes one, `retention` removes old ones. `states`
are its contents, `run_record` the settings of the run that wrote it, `folder` its files. `dcp` and `hf`
(with `hf_assets`) read and write the two formats. `conversion` is for scripts; `stream` sends weights.
"""
