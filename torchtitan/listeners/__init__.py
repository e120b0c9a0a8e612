"""What watches a run: metrics, validation, the isolation probe, profiling, requests to stop."""
