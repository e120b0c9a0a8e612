"""verl 0.9.1 on machines without an accelerator: the CPU as a device, and a rollout for small models.

Set PYTHONPATH to the folder of this package and VERL_USE_EXTERNAL_MODULES=verl_on_cpu.register; see
docs/verl.md.
"""
