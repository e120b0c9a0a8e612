"""For `experimental.custom_import`: a dataset "stream" of three files, and a model whose dataloader is
its own.
"""

import dataclasses

from torchtitan.data import DatasetConfig
from torchtitan.data.text_datasets import DATASETS
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec


def load_stream(_path: str):
    import datasets

    def read(files: list[int]):
        for file in files:
            yield from ({"text": f"story {n} of file {file} and its end"} for n in range(100))

    return datasets.IterableDataset.from_generator(read, gen_kwargs={"files": [1, 2, 3]})


def build_batches(**_):
    return iter(())


DATASETS["stream"] = DatasetConfig("", load_stream, lambda sample: sample["text"])
register_train_spec(
    "own_loader", dataclasses.replace(get_train_spec("llama3"), build_dataloader_fn=build_batches)
)
