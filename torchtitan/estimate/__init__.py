"""Estimates of what a rank of a job allocates, sends and computes in a step, without its devices.

`python -m torchtitan estimate` prints one estimate, `plan` ranks layouts; see docs/estimate.md. The step runs on
fake tensors, and in a torch without CUDA on a stand-in for it (`device`, `rehearsal`), which replaces private
parts of torch in this process for good: it is meant for a process of its own.
"""
