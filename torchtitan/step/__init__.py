"""One training step: the forwards and backwards (`runner`), then the optimizer (`update`)."""
