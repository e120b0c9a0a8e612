"""Running processes together: process groups, messages between ranks, failures, stopping."""
