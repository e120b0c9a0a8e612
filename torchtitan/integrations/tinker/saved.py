"""Saved states: their list, and the files of each that other programs read, for download.

Tinker's client downloads from URLs without its key. They are signed by this server, and expire.
"""

import hashlib
import hmac
import os
import secrets
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, BinaryIO

from torchtitan.integrations.tinker.requests import Refused, folder_of
from torchtitan.integrations.tinker.results import Answer
from torchtitan.tools.files import open_file, read_json_object

EXTERNAL = "external_weights"  # saved for other programs only: adapters, or Hugging Face's files
_KINDS = {"weights": "training", "sampler_weights": "sampler", EXTERNAL: "external"}
_PEFT = "peft"  # folder of a saved state with its adapters
_FILES = "/api/v1/files/"
_SECONDS_VALID = 3600

Route = tuple[str, str, Callable[..., Answer]]
"""(method, pattern of the path, handler)"""


class SavedFiles:
    """The saved states in a folder, which has them under <model>/<kind>/<name>."""

    def __init__(self, folder: str):
        self._folder = folder
        self._secret = secrets.token_bytes(32)  # signatures hold until the server ends
        saved = r"training_runs/([^/]+)/checkpoints/([^/]+)/([^/]+)"
        self.routes: list[Route] = [
            ("GET", r"training_runs/([^/]+)/checkpoints", self._list),
            ("GET", f"{saved}/external_weights_urls", self._urls),
            ("PUT", f"{saved}/ttl", lambda *_: Answer({})),
            ("DELETE", saved, self._delete),
            ("GET", r"files/\d+/\w+/([^/]+)/([^/]+)/([^/]+)/([^/]+)", self._send),
        ]

    def exists(self, path: str) -> bool:
        return os.path.exists(os.path.join(self._folder, path))

    def folder(self, path: str) -> str:
        """Return the folder of a saved state, by its tinker:// path. Raises Refused."""
        folder = os.path.join(self._folder, folder_of(path))
        if not os.path.isdir(folder):
            raise Refused(f"{path} is not among this server's saved states in {self._folder}", 404)
        return folder

    def loadable(self, path: str) -> str:
        """As `folder`, of a state that the policy can load."""
        if folder_of(path).split("/")[1] == EXTERNAL:
            raise Refused(f"{path} is for other programs; give a state that save_state saved")
        return self.folder(path)

    def lora_rank(self, path: str) -> int | None:
        """Return the rank of a saved state's adapters; None for a state without adapters."""
        file = os.path.join(self.folder(path), _PEFT, "adapter_config.json")
        return read_json_object(file)["r"] if os.path.exists(file) else None

    # ---- downloads ----

    def is_signed(self, path: str) -> bool:
        """True for the path of a download's URL whose time has not passed."""
        parts = path.removeprefix(_FILES).split("/", 2)
        if not path.startswith(_FILES) or len(parts) < 3 or not parts[0].isdecimal():
            return False
        expires, signature, file = parts
        is_ours = hmac.compare_digest(signature.encode(), self._signature(expires, file).encode())
        return is_ours and time.time() < int(expires[:20])

    def _signature(self, expires: str, file: str) -> str:
        return hmac.new(self._secret, f"{expires}/{file}".encode(), hashlib.sha256).hexdigest()

    def _sign(self, file: str) -> tuple[str, datetime]:
        """Return the path of a URL, and when it expires."""
        expires = int(time.time()) + _SECONDS_VALID
        path = f"{_FILES}{expires}/{self._signature(str(expires), file)}/{file}"
        return path, datetime.fromtimestamp(expires, UTC)

    def _urls(self, _: Any, model: str, kind: str, name: str) -> Answer:
        files = [os.path.basename(path) for path in self._paths(model, kind, name)]
        signed = {file: self._sign(f"{model}/{kind}/{name}/{file}") for file in files}
        expires = min(expiry for _, expiry in signed.values()).isoformat()

        def on_host(url: str) -> Answer:
            urls = {file: url + path for file, (path, _) in signed.items()}
            return Answer({"urls": urls, "expires": expires})

        return Answer(on_host=on_host)

    def _send(self, _: Any, model: str, kind: str, name: str, file: str) -> Answer:
        paths = self._paths(model, kind, name)
        path = next((path for path in paths if os.path.basename(path) == file), None)
        if path is None:
            raise Refused(f"tinker://{model}/{kind}/{name} has no file {file}", 404)

        def write(out: BinaryIO) -> None:
            with open_file(path, "rb") as source:
                shutil.copyfileobj(source, out)

        return Answer(write=write, length=os.path.getsize(path))

    def _paths(self, model: str, kind: str, name: str) -> list[str]:
        """Return the files of a saved state that other programs read. Raises Refused if it has none."""
        path = f"tinker://{model}/{kind}/{name}"
        folder = os.path.join(self._folder, folder_of(path), "" if kind == EXTERNAL else _PEFT)
        if not os.path.isdir(folder):
            raise Refused(
                f"{path} is not a saved state with adapters; save_weights_external saves one", 404
            )
        paths = [os.path.join(folder, file) for file in sorted(os.listdir(folder))]
        return [path for path in paths if os.path.isfile(path) and not path.endswith(".tmp")]

    # ---- the list ----

    def _list(self, _: Any, model: str) -> Answer:
        found = []
        for kind, kind_of_client in _KINDS.items():
            any_state = folder_of(f"tinker://{model}/{kind}/any")
            folder = os.path.dirname(os.path.join(self._folder, any_state))
            names = sorted(os.listdir(folder)) if os.path.isdir(folder) else ()
            for name in names:
                if name.startswith("."):  # being written
                    continue
                parts = [
                    os.path.join(inside, file)
                    for inside, _, files in os.walk(os.path.join(folder, name))
                    for file in files
                ]
                saved_at = os.path.getmtime(os.path.join(folder, name))
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{name}",
                        "checkpoint_type": kind_of_client,
                        "time": datetime.fromtimestamp(saved_at, UTC).isoformat(),
                        "tinker_path": f"tinker://{model}/{kind}/{name}",
                        "size_bytes": sum(os.path.getsize(part) for part in parts),
                    }
                )
        return Answer({"checkpoints": found})

    def _delete(self, _: Any, model: str, kind: str, name: str) -> Answer:
        if kind != EXTERNAL:
            raise Refused(f"only {EXTERNAL} can be deleted by clients, got {kind}/{name}")
        self._paths(model, kind, name)
        shutil.rmtree(os.path.join(self._folder, folder_of(f"tinker://{model}/{kind}/{name}")))
        return Answer({})
