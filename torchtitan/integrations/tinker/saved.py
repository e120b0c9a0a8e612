"""Lists saved states, and serves their files for other programs as downloads.

Tinker's client downloads without sending its key, so this server signs the URLs; they expire.
"""

import hashlib
import hmac
import os
import secrets
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchtitan.integrations.tinker.http import REACHED_AT
from torchtitan.integrations.tinker.requests import Answer, Refused, folder_of
from torchtitan.tools.files import read_json_object

# Files for other programs, in PEFT's or Hugging Face's format.
EXTERNAL = "external_weights"
_KINDS = {"weights": "training", "sampler_weights": "sampler", EXTERNAL: "external"}
# A saved state's subfolder with adapters in PEFT's format.
_PEFT = "peft"
_FILES = "/api/v1/files/"
_SECONDS_VALID = 3600


class SavedFiles:
    """The saved states in a folder, stored as <model>/<kind>/<name>."""

    def __init__(self, folder: str):
        self._folder = folder
        # With a new key, a restarted server refuses earlier signatures.
        self._secret = secrets.token_bytes(32)
        saved = "training_runs/([^/]+)/checkpoints/([^/]+)/([^/]+)"
        self.routes = [
            ("GET training_runs/([^/]+)/checkpoints", self._list),
            (f"GET {saved}/external_weights_urls", self._urls),
            (f"PUT {saved}/ttl", lambda *_: Answer({})),
            (f"DELETE {saved}", self._delete),
            (r"GET files/\d+/\w+/([^/]+)/([^/]+)/([^/]+)/([^/]+)", self._send),
        ]

    def exists(self, path: str) -> bool:
        return os.path.exists(os.path.join(self._folder, path))

    def folder(self, path: str) -> str:
        """Return the folder of a saved state by its tinker:// path. Raises Refused if it is missing."""
        folder = os.path.join(self._folder, folder_of(path))
        if not os.path.isdir(folder):
            raise Refused(f"{path} is not among this server's saved states in {self._folder}", 404)
        return folder

    def loadable(self, path: str) -> str:
        """Like `folder`, but also refuses a state that the policy cannot load."""
        if folder_of(path).split("/")[1] == EXTERNAL:
            raise Refused(f"{path} is for other programs; give a state that save_state saved")
        return self.folder(path)

    def lora_rank(self, path: str) -> int | None:
        """Return the rank of a saved state's adapters; None for a state without adapters."""
        file = os.path.join(self.folder(path), _PEFT, "adapter_config.json")
        return read_json_object(file)["r"] if os.path.exists(file) else None

    # ---- downloads ----

    def is_signed(self, path: str) -> bool:
        """True for a download path with a valid signature that has not expired."""
        parts = path.removeprefix(_FILES).split("/", 2)
        if not path.startswith(_FILES) or len(parts) < 3 or not parts[0].isdecimal():
            return False
        expires, signature, file = parts
        is_ours = hmac.compare_digest(signature.encode(), self._signature(expires, file).encode())
        return is_ours and time.time() < int(expires[:20])

    def _signature(self, expires: str, file: str) -> str:
        return hmac.new(self._secret, f"{expires}/{file}".encode(), hashlib.sha256).hexdigest()

    def _urls(self, _: Any, model: str, kind: str, name: str) -> Answer:
        expires, urls = int(time.time()) + _SECONDS_VALID, {}
        for file in self._files(model, kind, name):
            path = f"{model}/{kind}/{name}/{file}"
            signature = self._signature(str(expires), path)
            urls[file] = f"{REACHED_AT.get()}{_FILES}{expires}/{signature}/{path}"
        return Answer({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    def _send(self, _: Any, model: str, kind: str, name: str, file: str) -> Answer:
        path = self._files(model, kind, name).get(file)
        if path is None:
            raise Refused(f"tinker://{model}/{kind}/{name} has no file {file}", 404)
        return Answer(file=path)

    def _files(self, model: str, kind: str, name: str) -> dict[str, str]:
        """Return name -> path of a saved state's files for other programs. Raises Refused if none."""
        path = f"tinker://{model}/{kind}/{name}"
        folder = os.path.join(self._folder, folder_of(path), "" if kind == EXTERNAL else _PEFT)
        if not os.path.isdir(folder):
            remedy = "save_weights_external saves one"
            raise Refused(f"{path} is not a saved state with adapters; {remedy}", 404)
        with os.scandir(folder) as entries:
            return {x.name: x.path for x in entries if x.is_file() and not x.name.endswith(".tmp")}

    # ---- the list ----

    def _list(self, _: Any, model: str) -> Answer:
        found = []
        for kind, kind_of_client in _KINDS.items():
            folder = Path(self._folder, folder_of(f"tinker://{model}/{kind}/any")).parent
            # A folder whose name begins with "." is still being written.
            for state in sorted(folder.glob("[!.]*")):
                saved_at = datetime.fromtimestamp(state.stat().st_mtime, UTC)
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{state.name}",
                        "checkpoint_type": kind_of_client,
                        "time": saved_at.isoformat(),
                        "tinker_path": f"tinker://{model}/{kind}/{state.name}",
                        "size_bytes": sum(
                            x.stat().st_size for x in state.rglob("*") if x.is_file()
                        ),
                    }
                )
        return Answer({"checkpoints": found})

    def _delete(self, _: Any, model: str, kind: str, name: str) -> Answer:
        if kind != EXTERNAL:
            raise Refused(f"only {EXTERNAL} can be deleted by clients, got {kind}/{name}")
        self._files(model, kind, name)
        shutil.rmtree(os.path.join(self._folder, folder_of(f"tinker://{model}/{kind}/{name}")))
        return Answer({})
