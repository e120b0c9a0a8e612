"""An HTTP server on rank 0, for a policy that runs on all ranks of the job."""

import ipaddress
import os
import signal
import socket
from collections.abc import Callable

import torch.distributed as dist

from torchtitan.integrations.tinker.client import LocalTrainingClient
from torchtitan.integrations.tinker.http import Access, HttpServer
from torchtitan.integrations.tinker.policy import CommandLoop, Policy
from torchtitan.integrations.tinker.service import Service
from torchtitan.rl.checks import api_key
from torchtitan.rl.job_config import JobConfig
from torchtitan.step.runner import on_error
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger
from torchtitan.tools.signals import SignalThread


class Server:
    """Serves the config's policy from `train` until `stop`.

    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, job_config: JobConfig):
        self._config = job_config
        self._client = LocalTrainingClient(job_config)
        with on_error(self._client.close):
            self._commands = CommandLoop(Policy(self._client, job_config), job_config)
        self.checkpointer = self._client.checkpointer

    def train(self, on_start: Callable[[str], None] = lambda url: None) -> None:
        """Serve until `stop`, on every rank. on_start: called with the URL, on rank 0.

        Raises ConfigError if the server cannot listen at the config's address.
        """
        signals = SignalThread(self._hear)
        signals.start()
        try:
            if dist.is_initialized() and dist.get_rank() > 0:
                # `run` returns after rank 0 has called `stop`.
                self._commands.run()
            else:
                self._serve(on_start)
        finally:
            signals.close()

    def _hear(self, number: int) -> None:
        logger.info("%s: the server ends", signal.Signals(number).name)
        self.stop()

    def _serve(self, on_start: Callable[[str], None]) -> None:
        config = self._config.rl.serve
        try:
            service = Service(self._config, self._client, self._commands.put)
            names, key = ("localhost", socket.gethostname().lower(), *config.names), api_key(config)
            http = HttpServer(
                config.host,
                config.port,
                config.max_request_mib * 2**20,
                Access(names, key, service.files.is_signed),
                service.answer,
            )
        except OSError as error:
            self._commands.stop()
            # After `stop`, this call only tells the other ranks to return from `run`.
            self._commands.run()
            raise ConfigError(
                f"rl.serve.host = {config.host!r} and rl.serve.port = {config.port} must be free "
                f"to listen at: {error}; choose another port, or 0 for any"
            ) from error
        if not key and not ipaddress.ip_address(http.host).is_loopback:
            logger.warning(
                "rl.serve.host = %r lets every machine that reaches it train and sample; set "
                "rl.serve.api_key_file to require a key from clients",
                config.host,
            )
        if key and (mode := os.stat(config.api_key_file).st_mode & 0o777) & 0o077:
            path = config.api_key_file
            logger.warning(
                "other users may read or change the key in %s (mode %o): chmod 600", path, mode
            )
        http.start()
        logger.info("serving %s at %s", config.base_model, http.url)
        on_start(http.url)
        try:
            self._commands.run()
        finally:
            service.close()
            http.close()
            logger.info("the server has ended")

    def stop(self) -> None:
        """End `train` after the running command. Call on rank 0, from any thread."""
        self._commands.stop()

    def close(self) -> None:
        """Free the policy. Safe to call twice."""
        self._client.close()
