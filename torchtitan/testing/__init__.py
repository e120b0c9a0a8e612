"""What an embedder can run too: helpers that check a build of torchtitan on the spot."""
