"""Run a program of the tinker package on a policy in this process: no server, no HTTP.

    python examples/rl/tinker_cookbook/in_process.py examples/rl/tinker_cookbook/serve.toml \
        tinker_cookbook.recipes.chat_sl.train model_name=local/bytes ...

Arguments that begin with "--" are for the config. Needs one environment with both packages.
"""

import runpy
import sys

import tinker

from torchtitan.config import ConfigManager
from torchtitan.rl.client import LocalServiceClient
from torchtitan.rl.job_config import JobConfig

if __name__ == "__main__":
    config_file, program, *arguments = sys.argv[1:]
    flags = [f"--job.config_file={config_file}", *(x for x in arguments if x.startswith("--"))]
    service = LocalServiceClient(ConfigManager(JobConfig).parse_args(flags))
    tinker.ServiceClient = lambda *_, **__: service
    sys.argv = [program, *(x for x in arguments if not x.startswith("--"))]
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    with service:
        run(program, run_name="__main__")
