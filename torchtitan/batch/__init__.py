"""Batches of packed documents: boundaries, policy, context-parallel shards, dummies."""
