"""Families that are a table of facts about the decoder: each file is one `model.name`."""
