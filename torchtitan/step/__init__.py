"""One training step: the calls (`forward`), their microbatches (`runner`), the update (`update`)."""
