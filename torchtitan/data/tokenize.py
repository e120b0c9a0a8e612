"""Writes a dataset's documents as token ids, for training.dataset = "tokens".

    torchtitan tokenize /data/books /data/books_tokens --tokenizer assets/hf/NAME
    torchtitan tokenize --check /data/books_tokens

The ids equal those of training on the text itself; `token_files` describes the format. After an
interruption, run the same command again: complete parts are kept.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torchtitan.config.checks.common import guess, import_named
from torchtitan.data import token_files
from torchtitan.data.document_sources import Source
from torchtitan.data.local_files import record_of
from torchtitan.data.text_datasets import DATASETS, text_encoder
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.tools import events, storage
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.files import UNFINISHED, find_shipped, whole_file
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.logging import init_logger, logger

MOST_DOCUMENTS_PER_PART = 100_000


def main(arguments: list[str] | None = None) -> None:
    """Run the command. Exit code 2: cannot run as given; 1: document, file or process failed; 130: Ctrl-C."""
    init_logger()
    try:
        _plan(_parser().parse_args(arguments)).write()
    except KeyboardInterrupt:
        print("interrupted; run the same command again to write the other parts", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(events.exit_code(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan tokenize",
        usage="%(prog)s SOURCE OUT --tokenizer FOLDER [options]",
        description="Write a dataset's documents as token ids, for training.dataset = 'tokens'.",
    )
    parser.add_argument(
        "source",
        help="a data file, a folder of data files, an address, or the name of a registered dataset",
    )
    add = parser.add_argument
    add("out", help="the folder to write")
    add("--check", action=_Check, metavar="OUT", help="only compare a folder with its checksums")
    add("--tokenizer", required=True, help="a folder with tokenizer.json")
    add("--bos_token", help="as training.bos_token")
    add("--eos_token", help="as training.eos_token")
    add("--processes", type=_positive, default=os.cpu_count(), help="default: one per CPU")
    size = f"default: four parts per process, of at most {MOST_DOCUMENTS_PER_PART:,} documents"
    add("--documents_per_part", type=_positive, help=f"documents of one pair of files; {size}")
    add("--overwrite", action="store_true", help="remove what this program wrote to the folder")
    add("--custom_import", help="a module to import, which registers a dataset")
    return parser


class _Check(argparse.Action):
    """The option --check: checks a folder and exits; like --help, it needs no other arguments."""

    def __call__(self, parser: Any, namespace: Any, folder: Any, option: Any = None) -> None:
        tokens = token_files.TokenDocuments(folder)
        tokens.check()
        logger.info(
            f"{folder}: all {len(tokens):,} documents ({tokens.num_tokens:,} tokens) have the content that "
            "was written"
        )
        parser.exit()


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


@dataclass
class _Job:
    """A folder to write. about: the content of tokens.json. dataset: the source's registered name."""

    documents: Any  # has len() and [i]; is pickled for other processes
    tokenizer: HuggingFaceTokenizer
    dataset: str
    custom_import: str | None
    folder: Path
    about: dict[str, Any]
    processes: int

    def prefix(self, part: int) -> str:
        return str(self.folder / f"part-{part:05d}")

    def numbers(self, part: int) -> range:
        size = self.about["documents_per_part"]
        return range(part * size, min((part + 1) * size, len(self.documents)))

    def write(self) -> None:
        self._remove_unfinished()
        num_parts = math.ceil(len(self.documents) / self.about["documents_per_part"])
        sizes = {part: self._size(part) for part in range(num_parts)}
        missing = [part for part, size in sizes.items() if size is None]
        if missing:
            self._write_about(finished=False, parts=[])
            logger.info(f"{len(missing)} parts to write, {num_parts - len(missing)} are complete")
        started, num_tokens = time.monotonic(), 0
        written: Any = ((part, self.write_part(part)) for part in missing)
        if missing and self.processes > 1:
            written = _written_in_processes(self, missing)
        try:
            with contextlib.closing(written):
                for number, (part, tokens) in enumerate(written, 1):
                    sizes[part] = tokens
                    num_tokens += tokens
                    seconds = time.monotonic() - started
                    left = seconds / number * (len(missing) - number) / 60
                    logger.info(
                        f"{number:,} of {len(missing):,} parts, {num_tokens:,} tokens, "
                        f"{num_tokens / seconds:,.0f} tokens/s, {left:.1f} min left"
                    )
        finally:
            self._remove_unfinished()
        parts = [
            {"name": f"part-{part:05d}", "documents": len(self.numbers(part)), "tokens": tokens}
            for part, tokens in sizes.items()
        ]
        num_tokens = sum(sizes.values())
        self._write_about(finished=True, check_sums=True, tokens=num_tokens, parts=parts)
        logger.info(
            f"{self.folder} is finished: {len(self.documents):,} documents of {num_tokens:,} tokens "
            f"in {len(parts)} parts; train on them with training.dataset = 'tokens' and "
            f"training.dataset_path = {str(self.folder)!r}"
        )

    def write_part(self, part: int) -> int:
        id_type = token_files.smallest_type(self.about["tokenizer"]["vocabulary_size"])
        source = Source(self.dataset, self.documents, text_encoder(self.dataset), self.tokenizer)
        documents = (
            document.ahead(document.num_left).ids
            for document in map(source.read, self.numbers(part))
        )
        try:
            return token_files.write_pair(self.prefix(part), documents, id_type)
        except OSError as error:
            raise RunError(
                f"{self.prefix(part)} cannot be written: {error}; remove the cause, and run the same "
                "command again, which continues from there"
            ) from error

    def _size(self, part: int) -> int | None:
        try:
            pair = token_files.Pair(self.prefix(part), has_sums=True)
            pair.check()
        except ValueError:
            return None
        return pair.num_tokens if len(pair) == len(self.numbers(part)) else None

    def _remove_unfinished(self) -> None:
        for file in self.folder.glob(f"*{UNFINISHED}"):
            file.unlink()

    def _write_about(self, **more: Any) -> None:
        with whole_file(self.folder / token_files.ABOUT_FILE, "w") as file:
            json.dump(self.about | more, file, indent=1)


def _plan(options: argparse.Namespace) -> _Job:
    if options.custom_import:
        import_named("--custom_import", options.custom_import)
    folder = Path(storage.require_disk("OUT", options.out))
    storage.require_disk("--tokenizer", options.tokenizer)
    try:
        tokenizer = HuggingFaceTokenizer(
            options.tokenizer, bos_token=options.bos_token, eos_token=options.eos_token
        )
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"--tokenizer: {error}") from None
    if tokenizer.eos_id is None:
        logger.warning(
            f"the tokenizer in {options.tokenizer} names no end-of-text token, so nothing marks the "
            "ends of documents; name one with --eos_token"
        )
    name, path = options.source, ""
    if name in DATASETS:
        path = find_shipped(DATASETS[name].path)
    elif storage.is_address(name):
        name, path = "local", name
    elif os.path.exists(name):
        name, path = "local", os.path.abspath(name)
    else:
        raise ConfigError(
            "SOURCE must be a data file, a folder of them or a registered dataset "
            f"({', '.join(DATASETS)}), got {name!r}{guess(name, DATASETS)} (looked in {os.getcwd()})"
        )
    text_encoder(name)
    documents = DATASETS[name].loader(path)
    if not hasattr(documents, "__len__") or len(documents) == 0:
        raise ConfigError(
            f"{options.source} has no documents, or is a stream without len() and [i]; download its files "
            "and give their folder as SOURCE"
        )
    about = {
        "format": token_files.ABOUT_FORMAT,
        "source": {"dataset": name, "path": path} | record_of(path),
        "tokenizer": {
            "sha256": token_files.tokenizer_hash(tokenizer),
            "vocabulary_size": token_files.vocabulary_size(tokenizer),
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        "documents": len(documents),
        "documents_per_part": options.documents_per_part,
    }
    if os.path.isdir(path) and folder.resolve().is_relative_to(Path(path).resolve()):
        raise ConfigError(
            f"OUT must not be in SOURCE, got {folder}, in {path}; name another folder"
        )
    try:
        FolderLock(str(folder))  # the lock is released when this process ends
    except RunError as error:
        raise RunError(
            f"{folder} is being written by another process; wait for it, or name another folder"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be made: {error}; name another folder"
        ) from error
    old = _old_about(folder, options.overwrite)
    if about["documents_per_part"] is None:
        size = min(math.ceil(len(documents) / (4 * options.processes)), MOST_DOCUMENTS_PER_PART)
        about["documents_per_part"] = (old or {}).get("documents_per_part") or size
    for key in about if old is not None else ():
        if old.get(key) != about[key]:
            raise ConfigError(
                f"{folder} was begun with {key} = {old.get(key)}, and this command has {about[key]}; "
                "write to another folder, or begin again with --overwrite"
            )
    return _Job(documents, tokenizer, name, options.custom_import, folder, about, options.processes)


def _old_about(folder: Path, overwrite: bool) -> dict[str, Any] | None:
    """Return an earlier run's tokens.json. overwrite: remove that run's files, and return None."""
    about_file = folder / token_files.ABOUT_FILE
    old = token_files.read_about(about_file)
    if overwrite and old is not None:
        # tokens.json is removed last, because it shows that this program wrote the other files.
        for ending in (".idx", ".bin", token_files.SUMS):
            for file in folder.glob(f"part-*{ending}"):
                file.unlink()
        about_file.unlink()
        return None
    if old is None and any(file.suffix in (".bin", ".idx") for file in folder.iterdir()):
        raise ConfigError(
            f"{folder} holds .bin or .idx files and no {token_files.ABOUT_FILE}, so this program did "
            "not write them; name another folder"
        )
    return old


# ---- several processes ----


def _written_in_processes(job: _Job, parts: list[int]) -> Iterator[tuple[int, int]]:
    """Write parts in `job.processes` processes; yield (part, number of tokens) after each part."""
    try:
        pickled = pickle.dumps(job)
    except Exception as error:  # pickle raises errors of several types
        reason = f"dataset {job.dataset!r} cannot be sent to other processes ({error})"
        raise ConfigError(f"{reason}; use --processes 1") from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan.data.text_datasets"])  # takes seconds to import
    # The fork server and the workers inherit SIG_IGN, so that only this process handles Ctrl-C, and then
    # kills the workers.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    of_caller = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(job.processes, len(parts)), context, _begin, (pickled,))
    try:
        futures = [pool.submit(_write_part, part) for part in parts]
        for future in as_completed(futures):
            yield future.result()
    # ConnectionError and EOFError are raised if a worker is killed while it starts.
    except (BrokenProcessPool, ConnectionError, EOFError) as error:
        raise RunError(
            "a tokenizing process was killed, most often for lack of host memory; run the same command "
            "with fewer --processes"
        ) from error
    finally:
        for worker in set(multiprocessing.active_children()) - of_caller:
            worker.kill()
        pool.shutdown()


_job_of_process: list[_Job] = []


def _begin(pickled: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    init_logger()
    job = pickle.loads(pickled)
    if job.custom_import:
        import_named("--custom_import", job.custom_import)
    _job_of_process.append(job)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _write_part(part: int) -> tuple[int, int]:
    return part, _job_of_process[0].write_part(part)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C
    main()
