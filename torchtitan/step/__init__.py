"""One training step: the forwards and backwards (`forward`), then the optimizer (`update`)."""
