import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from torchtitan.config import JobConfig
from torchtitan.data.open_document import OpenDocument
from torchtitan.data.tokenizer import HuggingFaceTokenizer, build_hf_tokenizer

ASSET = "./tests/assets/tokenizer"


@pytest.fixture(scope="module")
def shipped():
    return HuggingFaceTokenizer(ASSET)


def write_folder(folder, **files):
    """files: name with `__` for the dot -> content, JSON unless it is a string or bytes."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        data = text if isinstance(text, bytes) else text.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def word_backend(words=("[UNK]", "<s>", "</s>", "hello", "world")):
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


WORDS = {"tokenizer__json": word_backend().to_str()}


def folder_of_words(folder, **config):
    return write_folder(folder, **WORDS, tokenizer_config__json=config)


def test_shipped_tokenizer_fits_the_debug_models_exactly(shipped):
    assert shipped.get_vocab_size() == shipped.vocab_size == 2048
    assert sorted(shipped.get_vocab().values()) == list(range(2048))
    assert shipped.bos_token == "<|begin_of_text|>" and shipped.eos_token == "<|end_of_text|>"
    assert shipped.token_to_id("<|begin_of_text|>") == shipped.bos_id
    assert shipped.id_to_token(shipped.eos_id) == "<|end_of_text|>"
    assert shipped.token_to_id("<|pad|>") == 2047
    assert not shipped.default_add_bos and not shipped.default_add_eos
    assert not shipped.hf_adds_bos and not shipped.hf_adds_eos


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encode_and_decode(text):
    shipped = HuggingFaceTokenizer(ASSET)
    assert shipped.decode(shipped.encode(text), skip_special_tokens=False) == text


def test_begin_and_end_are_added_on_request_only(shipped):
    plain = shipped.encode("hello")
    assert shipped.encode(text="hello", add_bos=True) == [shipped.bos_id, *plain]
    assert shipped.encode("hello", add_eos=True) == [*plain, shipped.eos_id]
    assert shipped.encode("", add_bos=True, add_eos=True) == [shipped.bos_id, shipped.eos_id]
    assert shipped.encode() == []
    assert shipped.decode(token_ids=[shipped.bos_id, *plain]) == "hello"


def test_config_sets_what_is_added_by_default(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = HuggingFaceTokenizer(folder_of_words(tmp_path, **config))
    assert tokenizer.default_add_bos and not tokenizer.default_add_eos
    assert tokenizer.encode("hello") == [1, 3]
    assert tokenizer.encode("hello", add_bos=False, add_eos=True) == [3, 2]


def test_begin_token_of_the_backend_is_not_added_twice(tmp_path):
    backend = word_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    files = {"tokenizer__json": backend.to_str(), "tokenizer_config__json": config}
    tokenizer = HuggingFaceTokenizer(write_folder(tmp_path, **files))
    assert tokenizer.hf_adds_bos and not tokenizer.hf_adds_eos
    assert tokenizer.encode("hello", add_bos=True, add_eos=True) == [1, 3, 2]


def test_missing_folder_names_the_config_key():
    with pytest.raises(FileNotFoundError, match="/nowhere/tok.*model.hf_assets_path.*hf download"):
        HuggingFaceTokenizer("/nowhere/tok")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "[" * 100_000}, "cannot read the tokenizer in .*tokenizer.json"),
        (WORDS | {"tokenizer_config__json": '{"version": '}, "tokenizer_config.json"),
        ({"vocab__json": '{"version": ', "merges__txt": ""}, "vocab.json"),
        *((WORDS | {"tokenizer_config__json": {"eos_token": value}}, "eos_token")
          for value in ({"lstrip": True}, 7, {"content": 7})),
        ({"vocab__json": '{"a":' * 100_000, "merges__txt": ""}, "vocab.json is not valid JSON: .*too deeply"),
        ({"vocab__json": {"a": "b"}, "merges__txt": ""}, "(?s)merges.txt does not fit the vocabulary beside it: .*integer"),
        ({"vocab__json": {"a": 0}, "merges__txt": b"a\n\xff\n"}, "merges.txt does not fit.*can't decode byte 0xff"),
        ({"vocab__json": {"a": 0}, "merges__txt": "", "tokenizer_config__json": {"added_tokens_decoder": [1]}},
         "tokenizer_config.json: added_tokens_decoder must be an object"),
        ({"vocab__json": {"a": 0}, "merges__txt": "",
          "tokenizer_config__json": {"bos_token": {"content": "x", "special": "yes"}}},
         "tokenizer_config.json: bos_token cannot be used"),
        ({"vocab__txt": "a", "tokenizer_config__json": {"tokenizer_class": "BertTokenizer"}},
         "tokenizer_class 'BertTokenizer' is not supported; .* python -c"),
    ],
)  # fmt: skip
def test_content_that_is_no_tokenizer_is_named(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceTokenizer(write_folder(tmp_path / "t", **files))


def test_lines_of_merges_end_with_a_newline_only(tmp_path):
    """Published vocabularies have tokens with U+2028 and U+0085."""
    vocab, merges = {"\u2028": 0, "\x85": 1, "\u2028\x85": 2}, "#version: 0.2\n\u2028 \x85\n"
    folder = write_folder(tmp_path, vocab__json=vocab, merges__txt=merges)
    assert "\u2028" in HuggingFaceTokenizer(folder).get_vocab()


@pytest.mark.parametrize(
    ("config", "options", "begins"),
    [
        ({"bos_token": "<s>"}, {}, True),
        ({"bos_token": "<s>", "add_bos_token": False}, {}, False),
        ({"bos_token": "<s>", "add_bos_token": False}, {"bos_token": "<s>"}, True),
        ({"bos_token": "</s>"}, {}, False),  # one separator between documents is enough
        ({}, {}, False),
    ],
)
def test_documents_begin_as_the_files_and_the_job_say(config, options, begins, tmp_path, caplog):
    caplog.set_level("INFO")
    path = folder_of_words(tmp_path, **{"eos_token": "</s>"} | config)
    tokenizer = HuggingFaceTokenizer(path, **options)
    assert tokenizer.begins_documents == begins
    document = OpenDocument(0, tokenizer, "hello world")
    assert document.take(9).ids.tolist() == [1] * begins + [3, 4, 2]
    job = JobConfig()
    job.model.hf_assets_path, job.training.bos_token = path, options.get("bos_token")
    build_hf_tokenizer(job)
    said = "documents of text begin with bos_token '<s>', which transformers does not add"
    assert (said in caplog.text) == begins
    assert ("do not begin with bos_token" in caplog.text) == (bool(config) and not begins)
