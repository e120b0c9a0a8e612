"""Token ids on disk: Megatron-LM's layout, written and read, and everything that is refused."""

import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.reliability import jobs
from torchtitan.data import DatasetConfig, tokenize
from torchtitan.data.text_datasets import DATASETS
from torchtitan.data.token_files import TokenDocuments, write_pair
from torchtitan.data.tokenizer import HuggingFaceTokenizer

pytestmark = pytest.mark.long

# Written by the IndexedDatasetBuilder of megatron-core 0.16.1, with uint16 ids: four documents of 2,
# 1, 0 and 3 sequences, one of which is empty.
MEGATRON_DOCUMENTS = [[[5, 6, 7], [8, 9]], [[1000]], [], [[2, 3], [], [4]]]
MEGATRON_BIN = "05000600070008000900e803020003000400"
MEGATRON_IDX = (
    "4d4d4944494458000001000000000000000806000000000000000500000000000000"  # header
    "030000000200000001000000020000000000000001000000"  # lengths
    "000000000000000006000000000000000a00000000000000"  # pointers
    "0c0000000000000010000000000000001000000000000000"
    "0000000000000000020000000000000003000000000000000300000000000000"  # documents
    "0600000000000000"
)
WORDS = ["one two three", "", "four five six seven", "eight", "nine ten"]


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer(str(jobs.TOKENIZER))


@pytest.fixture
def lines(tmp_path):
    """Return the path of a JSON-lines file with the texts of WORDS."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in WORDS))
    return path


@pytest.fixture
def stories(tmp_path):
    """Return the path of a JSON-lines file with 600 stories."""
    lines = (jobs.ROOT / "tests/assets/c4_test/data.json").read_text().splitlines(keepends=True)
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(lines[:600]))
    return path


def command_of(source, out, *options):
    return list(map(str, [source, out, "--tokenizer", jobs.TOKENIZER, "--processes", 1, *options]))


def run(command, exit_code=0):
    """Run the program in this process."""
    code = 0
    try:
        tokenize.main(command)
    except SystemExit as error:
        code = error.code or 0
    assert code == exit_code


def write(source, out, *options, exit_code=0):
    run(command_of(source, out, *options), exit_code)


def test_process_that_is_killed_while_it_starts_is_told(tmp_path, monkeypatch, capsys):
    class Killed(tokenize.ProcessPoolExecutor):
        def submit(self, *_):
            raise BrokenPipeError(32, "Broken pipe")  # from the pipe with what it should do

    monkeypatch.setattr(tokenize, "ProcessPoolExecutor", Killed)
    (tmp_path / "a.txt").write_text("text")
    write(tmp_path / "a.txt", tmp_path / "out", "--processes", 2, exit_code=1)
    assert "error: a tokenizing process was killed, most often for" in capsys.readouterr().err


def content(folder):
    return {f.name: f.read_bytes() for f in Path(folder).iterdir() if f.name != ".lock"}


def pack(prefix, documents, code, letter):
    """Write a pair by the published layout; documents: lists of sequences of ids."""
    sequences = [sequence for document in documents for sequence in document]
    item = struct.calcsize("<" + letter)
    starts = np.cumsum([0] + [item * len(s) for s in sequences])[:-1].tolist()
    firsts = np.cumsum([0] + [len(d) for d in documents]).tolist()
    ids = sum(sequences, [])
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
        + struct.pack(f"<{len(sequences)}i", *map(len, sequences))
        + struct.pack(f"<{len(sequences)}q", *starts)
        + struct.pack(f"<{len(firsts)}q", *firsts)
    )


# ---- reading and writing ----


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_pair_of_megatron_is_read_by_prefix_or_by_either_file(tmp_path, ending):
    (tmp_path / "a.b.bin").write_bytes(bytes.fromhex(MEGATRON_BIN))
    (tmp_path / "a.b.idx").write_bytes(bytes.fromhex(MEGATRON_IDX))
    tokens = TokenDocuments(f"{tmp_path}/a.b{ending}")
    assert [ids.tolist() for ids in tokens] == [sum(ids, []) for ids in MEGATRON_DOCUMENTS]
    assert (tokens[0].dtype, tokens.num_tokens) == (np.uint16, 9)
    pack(tmp_path / "ours", MEGATRON_DOCUMENTS, 8, "H")
    assert (tmp_path / "ours.idx").read_bytes().hex() == MEGATRON_IDX


@pytest.mark.parametrize(
    ("code", "letter", "largest"),
    [(1, "B", 255), (3, "h", 2**15 - 1), (4, "i", 2**31 - 1), (5, "q", 2**63 - 1), (8, "H", 65535)],
)
def test_every_integer_type_is_read_and_written_pairs_have_the_published_layout(
    tmp_path, code, letter, largest
):
    documents = [[1, 2, 3], [], [largest], list(range(100))]
    pack(tmp_path / "packed", [[document] for document in documents], code, letter)
    tokens = TokenDocuments(f"{tmp_path}/packed")
    assert [tokens[i].tolist() for i in range(4)] == documents
    if code in (4, 8):
        assert write_pair(str(tmp_path / "written"), documents, tokens[0].dtype) == 104
        for ending in (".bin", ".idx"):
            written = (tmp_path / f"written{ending}").read_bytes()
            assert written == (tmp_path / f"packed{ending}").read_bytes()


def test_documents_of_several_pairs_follow_in_the_order_of_names(tmp_path):
    pack(tmp_path / "b", [[[3]], [[4, 5]]], 4, "i")
    pack(tmp_path / "a", [[[1, 2]]], 8, "H")
    pack(tmp_path / "c", [], 8, "H")
    (tmp_path / "._a.idx").write_bytes(b"left by a Mac")
    tokens = pickle.loads(pickle.dumps(TokenDocuments(str(tmp_path))))  # as in a data worker
    assert [tokens[i].tolist() for i in range(len(tokens))] == [[1, 2], [3], [4, 5]]
    assert tokens.where(2) == f"{tmp_path}/b.bin, document 1 (counted from 0)"
    for index in (-1, 3):
        with pytest.raises(IndexError):
            tokens[index]


def test_opening_does_not_read_the_index(tmp_path):
    number = 10**8
    with open(tmp_path / "a.idx", "wb") as file:  # 2 GB of zeros that take no space
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, number, number + 1))
        file.seek(20 * number, os.SEEK_CUR)
        file.write(struct.pack("<q", number))
    (tmp_path / "a.bin").touch()
    started = time.process_time()
    tokens = TokenDocuments(str(tmp_path))
    assert (len(tokens), len(tokens[number // 2])) == (number, 0)
    assert time.process_time() - started < 0.1  # a pass takes some 0.5 s; this takes 0.001 s


def test_ids_on_disk_are_those_of_the_text(tmp_path, lines, tokenizer):
    write(lines, tmp_path / "out", "--documents_per_part", 2)
    tokens = TokenDocuments(str(tmp_path / "out"))
    tokens.check_tokenizer(tokenizer)
    assert [tokens[i].tolist() for i in range(len(tokens))] == [
        tokenizer.encode(text, add_bos=True, add_eos=True) for text in WORDS
    ]
    about = json.loads((tmp_path / "out/tokens.json").read_text())
    assert [part["documents"] for part in about["parts"]] == [2, 2, 1]
    assert about["tokens"] == tokens.num_tokens == sum(part["tokens"] for part in about["parts"])
    assert about["source"]["bytes"] == lines.stat().st_size
    assert about["tokenizer"]["eos_id"] == tokenizer.eos_id == tokens[4][-1]


def test_several_processes_write_the_bytes_of_one(tmp_path, stories):
    options = ("--documents_per_part", 100)
    write(stories, tmp_path / "one", *options)
    write(stories, tmp_path / "two", *options, "--processes", 2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(content(tmp_path / "one")) == 19


# ---- stopped and started again ----


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT]
)
def test_stopped_run_goes_on_and_ends_with_the_bytes_of_an_undisturbed_run(
    tmp_path, stories, capsys, number
):
    options = ("--documents_per_part", 20)
    write(stories, tmp_path / "whole", *options)
    out = tmp_path / "stopped"
    command = command_of(stories, out, *options)
    job = jobs.start(command, tmp_path / "logs", module="torchtitan.data.tokenize")
    deadline = time.monotonic() + 30
    while not (out / "part-00003.idx").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    job.send(number)
    outcome = job.wait(30)
    if number == signal.SIGINT:
        assert outcome.exit_codes == [130]
        last_line = outcome.output.splitlines()[-1]
        assert last_line == "interrupted; run the same command again to write the other parts"
    with pytest.raises(ValueError, match="tokens.json says that the folder is unfinished"):
        TokenDocuments(str(out))
    kept = (out / "part-00003.idx").stat().st_mtime_ns
    (out / "part-00002.bin").write_bytes(b"cut off")
    capsys.readouterr()

    write(stories, out)  # with the parts' size of the first run
    assert content(out) == content(tmp_path / "whole")
    assert (out / "part-00003.idx").stat().st_mtime_ns == kept
    assert "are complete" in capsys.readouterr().out


@pytest.mark.parametrize("processes", [1, 2])
def test_failed_document_ends_all_processes_and_keeps_the_parts_before_it(
    tmp_path, lines, capsys, processes
):
    lines.write_text(lines.read_text() + '{"text": "half of \\ud800"}\n')
    options = ("--documents_per_part", 2, "--processes", processes)
    write(lines, tmp_path / "out", *options, exit_code=1)
    assert f"error: {lines}, line 6: the text has half of a surr" in capsys.readouterr().err
    assert not multiprocessing.active_children()
    names = {f"part-0000{i}.{ending}" for i in range(2) for ending in ("bin", "idx", "crc32")}
    if processes == 1:
        assert content(tmp_path / "out").keys() == names | {"tokens.json"}  # and no .unfinished


# ---- refused commands ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], None),  # the same command leaves a finished folder as it is
        (["--documents_per_part", 2], "was begun with documents_per_part = 1, and this command has 2"),
        (["--eos_token", "no such token"], "must be a token of the tokenizer"),
        (["--bos_token", "<|pad|>"], "was begun with tokenizer = {'sha256': "),
        (["--processes", 0], "--processes: must be a whole number of at least 1, got '0'"),
        (["--custom_import", "nothere"], "--custom_import names a module to import, got 'nothere'"),
        (["--tokenizer", "/nowhere"], "--tokenizer: tokenizer folder '/nowhere' does not exist"),
    ],
)  # fmt: skip
def test_folder_of_another_command_is_refused(tmp_path, lines, capsys, options, sentence):
    write(lines, tmp_path / "out", "--documents_per_part", 1)
    before = content(tmp_path / "out")
    (tmp_path / "out/part-00009.bin.123.unfinished").touch()
    write(lines, tmp_path / "out", *options, exit_code=2 if sentence else 0)
    assert not sentence or sentence in capsys.readouterr().err
    (tmp_path / "out/part-00009.bin.123.unfinished").unlink(missing_ok=bool(not sentence))
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("change", ["renamed", "replaced"])
def test_source_whose_files_changed_between_kill_and_resume_is_refused_until_overwrite(
    tmp_path, capsys, change
):
    """Number, bytes and times of all files together stay the same, and so do those of each file."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in "bcd":
        lines = (json.dumps({"text": f"{name} {i:06}"}) for i in range(40))
        (source / f"{name}.jsonl").write_text("\n".join(lines))
        os.utime(source / f"{name}.jsonl", (1, 1))
    write(source, out, "--documents_per_part", 30)
    (out / "part-00003.idx").unlink()  # as if it was killed
    if change == "renamed":
        (source / "d.jsonl").rename(source / "a.jsonl")
    else:
        text = (source / "c.jsonl").read_text()
        (source / "c.jsonl").write_text(text[:-8] + text[-8:].replace("9", "8"))
        os.utime(source / "c.jsonl", (1, 1))
    write(source, out, exit_code=2)
    error = capsys.readouterr().err
    assert "was begun with source = " in error and "or begin again with --overwrite" in error
    write(source, out, "--overwrite", "--documents_per_part", 120)
    names = {"part-00000.bin", "part-00000.crc32", "part-00000.idx", "tokens.json"}
    assert content(out).keys() == names


@pytest.mark.parametrize(
    ("source", "out", "code", "sentence"),
    [
        ("python_doc", "out", 2, "got 'python_doc', did you mean 'python_docs'? (looked in "),
        ("empty", "out", 2, "empty has no documents, or is a stream"),
        ("stream", "out", 2, "stream has no documents, or is a stream"),
        ("{path}", "in", 2, "OUT must not be in SOURCE, got {path}/in, in {path}; name"),
        ("{path}/text.jsonl", "text.jsonl/out", 2, "the folder {path}/text.jsonl/out cannot be made: "),
        ("{path}/text.jsonl", "foreign", 2, "this program did not write them"),
        ("{path}/text.jsonl", "locked", 1, "locked is being written by another process; wait for it"),
    ],
)  # fmt: skip
def test_source_or_folder_that_cannot_be_used_is_refused(
    tmp_path, lines, monkeypatch, capsys, source, out, code, sentence
):
    processor = DATASETS["local"].sample_processor
    monkeypatch.setitem(DATASETS, "stream", DatasetConfig("", lambda path: iter([]), processor))
    monkeypatch.setitem(DATASETS, "empty", DatasetConfig("", lambda path: [], processor))
    (tmp_path / "foreign").mkdir()
    pack(tmp_path / "foreign/part-00000", MEGATRON_DOCUMENTS, 8, "H")
    (tmp_path / "locked").mkdir()
    locking = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", locking, tmp_path / "locked/.lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        options = ["--overwrite"] if out == "foreign" else []
        write(source.format(path=tmp_path), tmp_path / out, *options, exit_code=code)
    assert sentence.format(path=tmp_path) in capsys.readouterr().err
    assert (tmp_path / "foreign/part-00000.idx").read_bytes().hex() == MEGATRON_IDX


# ---- refused files ----


def replace(name, at, new):
    """Return a function that overwrites bytes of a file in a folder."""

    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[at : at + len(new)] = new
        (folder / name).write_bytes(data)

    return damage


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def replace_number(at, letter, *numbers):
    return replace("a.idx", at, struct.pack(f"<{len(numbers)}{letter}", *numbers))


DAMAGES = {
    "no files": (remove("a.bin", "a.idx"), "{path}: no pair there (looked in "),
    "magic": (replace("a.idx", 0, b"TNTIDX\0\0"),
        "begins with b'TNTIDX\\x00\\x00\\x00', but Megatron-LM's format begins with b'MMIDIDX"),
    "version": (replace("a.idx", 9, b"\2"), "a.idx has version 2 and ids of the type code 8"),
    "float": (replace("a.idx", 17, b"\6"), "ids of the type code 6; known are version 1"),
    "cut index": (cut("a.idx", 100), "has 100 bytes, and 146 are needed for its 6 sequences and 4 doc"),
    "documents": (replace_number(138, "q", 5),
        "lists documents of the sequences [0, 5], not 0 to 6; copy or write the pair again"),
    "cut data": (cut("a.bin", 17), "a.bin has 17 bytes, and its index lists 18: one of the two"),
    "pointer": (replace_number(66, "q", 8),
        "document 0 (counted from 0): a file of the pair is damaged, or belongs to another pair: the index lists"),
    "length": (replace_number(34, "i", -9), "lists sequences at bytes [0, 6]"),
    "document order": (replace_number(114, "q", 99), "lists sequences 0 to 99 of 6; copy the folder again"),
    "overlap": (replace_number(58, "q", 2, 8), "lists sequences at bytes [2, 8] for 0 to 12 of 18"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused(tmp_path, name):
    damage, sentence = DAMAGES[name]
    pack(tmp_path / "a", MEGATRON_DOCUMENTS, 8, "H")
    damage(tmp_path)
    with pytest.raises(ValueError) as caught:
        TokenDocuments(f"{tmp_path}/a")[0]
    assert sentence.format(path=f"{tmp_path}/a") in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_lengths_of_a_damaged_index_are_refused(tmp_path):
    for place, number in ((114, 99), (122, 1)):
        pack(tmp_path / "a", MEGATRON_DOCUMENTS, 8, "H")
        replace_number(place, "q", number)(tmp_path)
        with pytest.raises(ValueError, match=r"a\.idx is damaged: a document begins before"):
            _ = TokenDocuments(str(tmp_path)).lengths


# Changes of tokens.json, and of its only part.
ABOUT_DAMAGES = {
    "its format is 2; this version reads 1": lambda about, part: about | {"format": 2},
    "cannot be read (KeyError: 'parts')": lambda about, part: {"format": 1},
    "cannot be read (TypeError: unsupported operand": lambda about, part: about | {
        "parts": [part | {"tokens": "28"}]},
    "says that the folder is unfinished": lambda about, part: about | {"finished": False},
    "and the folder has None; copy the whole folder again": lambda about, part: about | {
        "parts": [part, part | {"name": "part-1"}]},
    "of part-00000 = (5, 1), and the folder has (5, ": lambda about, part: about | {
        "parts": [part | {"tokens": 1}]},
}  # fmt: skip


def test_folder_that_differs_from_its_tokens_json_is_refused(tmp_path, lines):
    write(lines, tmp_path / "out", "--documents_per_part", 10)
    file = tmp_path / "out/tokens.json"
    about = json.loads(file.read_text())
    for sentence, change in ABOUT_DAMAGES.items():
        file.write_text(json.dumps(change(about, about["parts"][0])))
        with pytest.raises(ValueError, match=re.escape(sentence)):
            TokenDocuments(str(tmp_path / "out"))


def of_other_part(*endings):
    """Return a function that puts files of the second part in the place of the first part's."""
    return lambda folder: [
        shutil.copy(folder / f"part-00001{ending}", folder / f"part-00000{ending}")
        for ending in endings
    ]


# The parts have two documents each, of 5 and 3 ids and of 3 and 5.
SILENT_DAMAGES = {
    "one bit": lambda f: replace("part-00000.bin", 3, [(f / "part-00000.bin").read_bytes()[3] ^ 4])(f),
    "swapped sequences": replace("part-00000.idx", 34, struct.pack("<iiqq", 3, 5, 10, 0)),
    "moved boundary": replace("part-00000.idx", 34, struct.pack("<iiqq", 4, 4, 0, 8)),
    "other index": of_other_part(".idx"),
    "other tokens": of_other_part(".bin"),
    "other part": of_other_part(".idx", ".bin", ".crc32"),
    "sums": replace("part-00000.crc32", 2, b"12"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder with a source of four documents, and their tokens in two parts."""
    folder = tmp_path_factory.mktemp("finished")
    texts = ["a b c", "d", "e", "f g h"]
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    write(folder / "text.jsonl", folder / "out", "--documents_per_part", 2)
    tokens = TokenDocuments(str(folder / "out"))
    assert tokens.lengths.tolist() == [5, 3, 3, 5]
    return folder


@pytest.mark.parametrize("name", SILENT_DAMAGES)
def test_document_that_is_not_as_written_is_refused_and_mended(
    finished, tmp_path, tokenizer, capsys, name
):
    out = tmp_path / "out"
    shutil.copytree(finished / "out", out)
    SILENT_DAMAGES[name](out)
    place = r"out/part-00000\.(bin, document [01] \(counted from 0\): a file |bin has )"
    with pytest.raises(ValueError, match=place):
        tokens = TokenDocuments(str(out))
        tokens.check_tokenizer(tokenizer)
        [tokens[i] for i in range(len(tokens))]
    run(["--check", str(out)], exit_code=1)
    assert "error: " in (error := capsys.readouterr().err) and "part-00000" in error
    write(finished / "text.jsonl", out)
    assert content(out) == content(finished / "out")
    run(["--check", str(out)])
    assert (
        "out: all 4 documents (16 tokens) have the content that was written"
        in capsys.readouterr().out
    )


def test_folder_without_sums_is_read_with_a_line(finished, tmp_path, tokenizer, caplog, capsys):
    out = tmp_path / "out"
    shutil.copytree(finished / "out", out)
    for file in out.glob("*.crc32"):
        file.unlink()
    with pytest.raises(ValueError, match=r"part-00000\.crc32: missing"):
        TokenDocuments(str(out))
    about = json.loads((out / "tokens.json").read_text())
    del about["check_sums"]
    (out / "tokens.json").write_text(json.dumps(about))
    tokens = TokenDocuments(str(out))
    tokens.check_tokenizer(tokenizer)
    assert [len(tokens[i]) for i in range(4)] == [5, 3, 3, 5]
    (record,) = caplog.records
    assert f"{out}: it is unknown whether these tokens are damaged" in record.message
    run(["--check", str(out)], exit_code=1)
    assert "has no checksums to compare with" in capsys.readouterr().err


# ---- tokenizers ----


def test_tokens_of_another_tokenizer_are_refused_with_both_hashes(tmp_path, lines, tokenizer):
    write(lines, tmp_path / "out")
    tokens = TokenDocuments(str(tmp_path / "out"))
    tokens.check_tokenizer(HuggingFaceTokenizer(str(jobs.TOKENIZER)))
    other = HuggingFaceTokenizer(str(jobs.TOKENIZER))
    other.tokenizer.add_tokens(["another"])
    hashes = [json.loads((tmp_path / "out/tokens.json").read_text())["tokenizer"]["sha256"]]
    for change in (lambda: None, lambda: setattr(other, "eos_id", 7)):
        change()
        with pytest.raises(ValueError, match="was written with another tokenizer") as caught:
            tokens.check_tokenizer(other)
        assert hashes[0] in str(caught.value)
        hashes.append(str(caught.value))
    assert len(set(hashes)) == 3


def test_tokens_without_a_hash_are_checked_by_their_ids(tmp_path, tokenizer, caplog):
    size = max(tokenizer.get_vocab().values()) + 1
    pack(tmp_path / "a", [[[1, 2]]] * 7 + [[[3, size - 1]]], 4, "i")
    TokenDocuments(str(tmp_path)).check_tokenizer(tokenizer)
    for wrong in (size, -1):
        pack(tmp_path / "a", [[[1, 2]]] * 7 + [[[3, wrong]]], 4, "i")
        sentence = rf"a.bin, document 7 \(counted from 0\) has the id {wrong}, and the tokenizer's"
        with pytest.raises(ValueError, match=sentence):
            TokenDocuments(str(tmp_path)).check_tokenizer(tokenizer)
    for wrong in (-100, size):  # in a document that is not looked at before training
        pack(tmp_path / "a", [[[1, 2]]] * 7 + [[[3, wrong]]] + [[[4]]] * 292, 4, "i")
        tokens = TokenDocuments(str(tmp_path))
        tokens.check_tokenizer(tokenizer)
        with pytest.raises(ValueError, match=f"a.bin, document 7 .* has the id {wrong}, and the"):
            pickle.loads(pickle.dumps(tokens))[7]  # as in a data worker
    (record,) = caplog.records
    assert "were made with this job's tokenizer, because there is no tokens.json" in record.message
