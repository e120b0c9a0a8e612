"""Estimates of what a rank of a job allocates, sends and computes in a step, without its devices.

`python -m torchtitan estimate` prints one estimate, `plan` ranks layouts; see docs/estimate.md. The step runs on
fake tensors. In a torch without CUDA, it runs on a stand-in for CUDA (`device`, `rehearsal`), which permanently
replaces private parts of torch, so run estimates in a separate process.
"""
