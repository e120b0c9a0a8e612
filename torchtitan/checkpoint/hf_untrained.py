"""Parts of a Hugging Face model that no family here trains, such as towers for images.

`checkpoint.untrained_weights` says what becomes of them.
"""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from torchtitan.checkpoint.folder import HF_INDEX, hash_file, own_share, path_inside
from torchtitan.checkpoint.hf import are_quantized, check_files
from torchtitan.checkpoint.hf_assets import write_json
from torchtitan.distributed.processes.ranks import from_rank_zero, on_all_ranks
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.files import read_json_object, regular_file, save_tensors
from torchtitan.tools.logging import logger

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class UntrainedParts(NamedTuple):
    """folder: of the model that has them. names: file there -> names of untrained tensors in it."""

    folder: str
    names: dict[str, list[str]]

    def copy_to(self, folder: str) -> dict[str, str]:
        """Copy them, bit for bit, to files of their own; return file name -> SHA-256. Collective.

        The export's index, which then lists them too, is among the files.
        """
        copies = {name: f"model-untrained-{n:05}.safetensors" for n, name in enumerate(self.names)}

        def copy_own_share() -> dict[str, tuple[str, int]]:
            """Return file name -> SHA-256, bytes of its tensors."""
            written = {}
            for source in own_share(list(self.names)):
                path = path_inside(self.folder, source)
                with safe_open(regular_file(path), framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in self.names[source]}
                path = os.path.join(folder, copies[source])
                save_tensors(tensors, path)
                written[copies[source]] = hash_file(path), sum(t.nbytes for t in tensors.values())
            return written

        written = {
            name: entry for part in on_all_ranks(copy_own_share) for name, entry in part.items()
        }
        index_path = Path(folder, HF_INDEX)

        def write_index() -> dict[str, str]:
            index = read_json_object(index_path)
            for source, names in self.names.items():
                index["weight_map"] |= dict.fromkeys(names, copies[source])
            index["metadata"]["total_size"] += sum(n_bytes for _, n_bytes in written.values())
            write_json(index_path, index)
            for name in _PROCESSOR_FILES:
                if os.path.isfile(source := os.path.join(self.folder, name)):
                    shutil.copy(source, folder)
            return {HF_INDEX: hash_file(str(index_path))}

        return {name: digest for name, (digest, _) in written.items()} | from_rank_zero(write_index)


def untrained_parts(folder: str, adapter: BaseStateDictAdapter) -> UntrainedParts | None:
    """Return the parts of the model in `folder` that an export copies; None if there are none.

    Warns if they cannot be copied, because an export must not fail at the end of a run.
    """
    names = {}
    try:
        for file_name in check_files(folder)[0]:
            with safe_open(regular_file(path_inside(folder, file_name)), framework="pt") as file:
                names[file_name] = list(file.keys())
        adapter = adapter.spelled_like([name for in_file in names.values() for name in in_file])
        for file_name, in_file in names.items():
            names[file_name] = [name for name in in_file if adapter.holds_untrained_part(name)]
            if are_quantized(names[file_name]):
                raise ValueError(f"those in {folder} are quantized, and the export is not")
    except (OSError, ValueError) as error:
        logger.warning(f"The export has no copy of parts that are not trained: {error}")
        return None
    names = {file_name: in_file for file_name, in_file in names.items() if in_file}
    return UntrainedParts(folder, names) if names else None
