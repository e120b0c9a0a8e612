"""Observers of a run: metrics, validation, the isolation probe, profiling."""
