"""Estimates what one rank of a job allocates, sends and computes in a step, without the job's GPUs.

`python -m torchtitan estimate` prints one estimate, `plan` ranks layouts; see docs/estimate.md. The step runs on
fake tensors. If torch was built without CUDA, a stand-in takes the place of CUDA (`device`, `rehearsal`). The
stand-in permanently replaces private parts of torch, so run estimates in a separate process.
"""
