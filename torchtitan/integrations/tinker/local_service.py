"""Tinker's ServiceClient in this process, so that a program runs with or without a server.

service = LocalServiceClient(job_config)      # or tinker.ServiceClient(base_url=...)
client = service.create_lora_training_client("policy", rank=16).result()
"""

from concurrent.futures import Future
from typing import Any

from torchtitan.integrations.tinker.client import LocalSamplingClient, LocalTrainingClient
from torchtitan.integrations.tinker.conversions import adapters_of
from torchtitan.integrations.tinker.types import AsyncNames, ClientFuture
from torchtitan.rl.job_config import JobConfig


class LocalServiceClient(AsyncNames):
    """Makes training and sampling clients of one policy in this process.

    There is one policy, and so one training client. Each call that makes one returns that client,
    started again. Arguments that describe a run (`user_metadata`, ...) are ignored.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, job_config: JobConfig):
        self._config = job_config
        self._training = LocalTrainingClient(job_config)
        self._training.load_initial_state().result()
        self._base = self._training.save_weights_and_get_sampling_client(pinned=True).result()

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        **_: Any,
    ) -> ClientFuture[LocalTrainingClient]:
        """Start again from the first weights, with new adapters if the model has the converter `lora`.

        base_model: ignored. Raises ValueError for adapters that the model cannot have.
        """
        lora = self._config.lora if self._training.checkpointer.has_adapters else None
        adapters = adapters_of(lora, rank, seed, train_attn, train_mlp, train_unembed)
        calls = [self._training.load_sampler_weights(self._base)]
        if adapters is not None:
            calls.append(self._training.start_adapters(**adapters))
        return self._started(*calls)

    def create_training_client_from_state(
        self, path: str, **_: Any
    ) -> ClientFuture[LocalTrainingClient]:
        """Start from the weights of a saved state, without its optimizer."""
        return self._started(self._training.load_state(path))

    def create_training_client_from_state_with_optimizer(
        self, path: str, **_: Any
    ) -> ClientFuture[LocalTrainingClient]:
        """Continue exactly from a saved state."""
        return self._started(self._training.load_state_with_optimizer(path))

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None, **_: Any
    ) -> ClientFuture[LocalSamplingClient]:
        """Return a client of a saved state, or of the weights that this service client began with."""
        if model_path is not None:
            return self._training.create_sampling_client(model_path)
        return self._training._thread.submit(lambda: self._base)

    def _started(self, *calls: Future) -> ClientFuture[LocalTrainingClient]:
        """Return the future of the training client; it raises what one of the calls raises."""

        def started() -> LocalTrainingClient:
            for call in calls:
                call.result()  # done, because the client's thread keeps the order of calls
            return self._training

        return self._training._thread.submit(started)

    def close(self, status: str = "success", detail: str | None = None) -> ClientFuture[None]:
        """Finish all calls. Safe to call twice."""
        self._training.close()
        closed: ClientFuture[None] = ClientFuture()
        closed.set_result(None)
        return closed

    def __enter__(self) -> "LocalServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
