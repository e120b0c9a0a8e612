"""Optimizers and learning-rate schedules of all parts of a model."""
