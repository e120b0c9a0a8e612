"""Losses over tokens, and log-probabilities without whole logits."""
