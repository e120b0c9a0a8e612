"""Losses over tokens, and log-probabilities without storing all logits."""
