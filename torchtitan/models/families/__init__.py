"""Families that are defined by a table of `CausalLMArgs`: each file is one `model.name`."""
