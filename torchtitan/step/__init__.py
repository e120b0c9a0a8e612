"""Training steps: forward and backward (`forward`), microbatches (`runner`), optimizer steps (`update`)."""
