"""Batches of packed documents: boundaries, attention masks, context-parallel shards, dummy microbatches."""
