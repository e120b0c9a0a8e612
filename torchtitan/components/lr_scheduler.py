"""The reference's path of `torchtitan.optim.lr_scheduler`."""
# ruff: noqa: F401

from torchtitan.optim.lr_scheduler import LRSchedulersContainer, build_lr_schedulers, set_lrs
