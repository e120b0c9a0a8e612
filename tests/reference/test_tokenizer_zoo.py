"""What `transformers` makes of a tokenizer's folder is its meaning: equal ids, or a refusal by name.

Each folder of the zoo is small and made here. Texts are random: controls, emoji, mixed scripts, blanks,
and the spellings of special tokens.
"""

import json
import random
import re

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from tests.tiny_hf import tiny_hf_config
from torchtitan.checkpoint.hf_assets import write_model_files
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.models.hf_config import from_hf_config

NUM_TEXTS = 2000
CORPUS = [
    "The quick brown fox jumps over the lazy dog's back; it's 12345 + 678 = 13023!",
    "Größe naïve café ñandú Ελληνικά русский 漢字かな 한국어 العربية हिन्दी",
    "def f(x):\n\treturn {'a': [1, 2]}\r\n\r\n    # end",
    "one two three four five six seven eight nine ten hello world",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
ALPHABET = (
    [*"abcXYZ019 .,'!-_", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\x00", "\x1b", "\x7f", "\u200b", "\ufeff"]
    + ["é", "e\u0301", "ﬁ", "İ", "ß", "漢", "か", "한", "ع", "हि", "🙂", "👩‍👩‍👧", "🇩🇪", "\u2028", "\u00a0", "▁", "Ġ", "##"]
    + ["hello", " world", "Hello", "it's", "12345", "[CLS]", "[MASK]", "<0x0A>", "<|", "|>"]
    + SPECIAL + [" <|end|> ", "<|END|>", "<tool>", "<late>", "x<s>y"]
)  # fmt: skip


def texts(seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["", *("".join(draw.choices(ALPHABET, k=draw.randint(1, 14))) for _ in range(NUM_TEXTS))]


def template(before: str = "<s> ", after: str = "", tokens=("<s>", "</s>")):
    def make(t: Tokenizer) -> processors.PostProcessor:
        known = [(token, t.token_to_id(token)) for token in tokens]
        return processors.TemplateProcessing(
            f"{before}$A{after}", f"{before}$A{after} {before}$B{after}", known
        )

    return make


def special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"special": True, "normalized": False} | flags)


def bpe(pre_tokenizer=None, normalizer=None, post=None, tokens=(), initial=True, **options):
    t = Tokenizer(models.BPE(**options))
    t.pre_tokenizer = pre_tokenizer or pre.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet() if initial else []
    named = ["<unk>"] if options.get("unk_token") else []
    if options.get("byte_fallback"):
        named += [f"<0x{byte:02X}>" for byte in range(256)]
    if normalizer is not None:
        t.normalizer = normalizer
    options = {"initial_alphabet": alphabet, "special_tokens": named, "show_progress": False}
    t.train_from_iterator(CORPUS, BpeTrainer(vocab_size=700, **options))
    return finished(t, tokens or SPECIAL, post)


def finished(t: Tokenizer, tokens, post=None) -> Tokenizer:
    for token in tokens:
        token = special(token) if isinstance(token, str) else token
        (t.add_special_tokens if token.special else t.add_tokens)([token])
    if post is not None:
        t.post_processor = post(t)
    return t


def unigram() -> Tokenizer:
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer = pre.Metaspace()
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    t.normalizer = normalizers.Sequence(steps)
    t.decoder = decoders.Metaspace()
    named = ["<unk>", "<s>", "</s>"]
    options = {"special_tokens": named, "unk_token": "<unk>", "show_progress": False}
    t.train_from_iterator(CORPUS, UnigramTrainer(vocab_size=300, **options))
    return finished(t, SPECIAL, template(after=" </s>", before=""))


def llama_2(legacy: bool = False) -> Tokenizer:
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    t = bpe(pre.Metaspace(), post=template(), initial=False, **options)
    content = json.loads(t.to_str())
    made = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None, "normalizer": None}))
    if legacy:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    return made


def split(pattern: str) -> pre.PreTokenizer:
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), byte_level])


def declared(content: str, **flags: bool) -> dict:
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, **off, "special": True, **flags}


QWEN = {"pre_tokenizer": split(QWEN_2), "normalizer": normalizers.NFC()}
ALL_FLAGS = [
    *SPECIAL,
    special("<tool>", lstrip=True),
    special("<late>", single_word=True),
    AddedToken("hello", normalized=True),
    AddedToken("Café", normalized=True, rstrip=True),
    AddedToken("12345", normalized=False, single_word=True),
]
OWN = "PreTrainedTokenizerFast"

# Name -> (tokenizer, tokenizer_config.json without the class, class, other files).
ZOO = {
    "byte-level": (bpe, {}, OWN, {}),
    "no class": (bpe, {}, None, {}),
    "class of transformers 5": (bpe, {}, "TokenizersBackend", {}),
    "prefix space": (lambda: bpe(pre.ByteLevel(add_prefix_space=True)), {}, OWN, {}),
    "prefix space only in the config": (bpe, {"add_prefix_space": True}, OWN, {}),
    "llama 3": (lambda: bpe(split(LLAMA_3), post=template(), ignore_merges=True), {}, OWN, {}),
    "qwen 2": (lambda: bpe(**QWEN), {}, "Qwen2Tokenizer", {}),
    "qwen 2 with declared tokens": (lambda: bpe(**QWEN), {"added_tokens_decoder": {
        str(449 + i): declared(t) for i, t in enumerate(SPECIAL)}}, "Qwen2Tokenizer", {}),
    "qwen 2 with flags": (
        lambda: bpe(**QWEN, tokens=[*SPECIAL[:4], special("<|end|>", rstrip=True)]), {}, "Qwen2Tokenizer", {}),
    "qwen 2 with flags of its eos": (
        lambda: bpe(**QWEN, tokens=[*SPECIAL[:4], special("<|end|>", rstrip=True)]),
        {"eos_token": "<|end|>"}, "Qwen2Tokenizer", {}),
    "qwen 3 by the model": (bpe, {}, OWN, {"config.json": {"model_type": "qwen3"}}),
    "qwen 3 without a class for another pattern": (bpe, {}, None, {"config.json": {"model_type": "qwen3"}}),
    "qwen 2 with whole words": (lambda: bpe(**QWEN, ignore_merges=True), {}, "Qwen2Tokenizer", {}),
    "class of qwen 2 for another pattern": (bpe, {}, "Qwen2Tokenizer", {}),
    "gpt 2": (bpe, {}, "GPT2Tokenizer", {}),
    "class of gpt 2 for another pattern": (lambda: bpe(split(LLAMA_3)), {}, "GPT2Tokenizer", {}),
    "metaspace": (llama_2, {}, OWN, {}),
    "llama 2": (lambda: llama_2(True), {"legacy": True}, "LlamaTokenizer", {}),
    "llama 2 with eos": (lambda: llama_2(True), {"add_bos_token": True, "add_eos_token": True}, "LlamaTokenizerFast", {}),
    "bos asked for": (bpe, {"add_bos_token": True}, OWN, {}),
    "bos refused": (lambda: bpe(post=template()), {"add_bos_token": False}, OWN, {}),
    "unigram": (unigram, {}, OWN, {}),
    "class of t5": (unigram, {}, "T5TokenizerFast", {}),
    "template and byte-level": (lambda: bpe(post=lambda t: processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template("<s> ", " </s>")(t)])), {}, OWN, {}),
    "every flag": (lambda: bpe(tokens=ALL_FLAGS), {}, OWN, {}),
    "flags that strip": (lambda: bpe(tokens=[*SPECIAL[:3], special("<|user|>", rstrip=True), special(
        "<|end|>", lstrip=True, rstrip=True)]), {"eos_token": "<|end|>"}, OWN, {}),
    "normalized special tokens": (lambda: bpe(normalizer=normalizers.Lowercase(), tokens=[
        *SPECIAL[:4], special("<|end|>", normalized=True)]), {"eos_token": "<|end|>"}, OWN, {}),
    "other flags in the decoder": (bpe, {"added_tokens_decoder": {
        "460": declared("<|end|>", rstrip=True), "459": declared("<|user|>", special=False)}}, OWN, {}),
    "new tokens in the decoder": (bpe, {"added_tokens_decoder": {
        "720": declared("<late>", lstrip=True), "711": declared("<tool>", special=False)}}, OWN, {}),
    "eos as an object": (bpe, {"eos_token": {"__type": "AddedToken", **declared("<|end|>", rstrip=True)}}, OWN, {}),
    "eos that is no token": (bpe, {"eos_token": "<late>"}, OWN, {}),
    "extra tokens by name": (bpe, {"extra_special_tokens": {"tool_token": "<tool>"}}, OWN, {}),
    "all lists": (bpe, {"image_token": "[CLS]", "extra_special_tokens": {"tool_token": "<tool>"},
        "additional_special_tokens": ["<late>"], "pad_token": "[MASK]"}, OWN, {}),
    "lists beside the decoder": (bpe, {"additional_special_tokens": ["<late>", "<|user|>"],
        "added_tokens_decoder": {"720": declared("<tool>")}, "eos_token": "[CLS]"}, OWN, {}),
    "map of special tokens": (bpe, {"eos_token": None, "bos_token": None}, OWN, {
        "special_tokens_map.json": {"eos_token": "</s>", "bos_token": declared("<s>", rstrip=True),
                                    "additional_special_tokens": ["<late>"]}}),
    "map beside the decoder": (bpe, {"added_tokens_decoder": {}}, OWN, {
        "special_tokens_map.json": {"eos_token": "<|end|>"}, "added_tokens.json": {"<tool>": 705}}),
    "added tokens by id": (bpe, {"additional_special_tokens": ["[CLS]"]}, OWN, {
        "added_tokens.json": {"<tool>": 462, "<late>": 461, "<|end|>": 460}}),
    "no config": (bpe, None, None, {}),
    "truncation": (lambda: (t := bpe(), t.enable_truncation(3), t.enable_padding(length=9, pad_token='<unk>'))[0], {}, OWN, {}),
}  # fmt: skip


REFUSED = {
    "qwen 2 with whole words": "another model .*'ignore_merges': True",
    "qwen 3 without a class for another pattern": "another normalizer and another pre_tokenizer",
    "qwen 2 with flags of its eos": "another way of stripping",
    "class of qwen 2 for another pattern": "another normalizer and another pre_tokenizer",
    "class of gpt 2 for another pattern": "another pre_tokenizer than the GPT2Tokenizer",
    "class of t5": "tokenizer_class 'T5Tokenizer' is not supported",
}


def write(folder, make, config, name, files) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    if config is not None:
        config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"} | config
        config = {key: value for key, value in config.items() if value is not None}
        files = files | {"tokenizer_config.json": config}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return str(folder)


def added(t: Tokenizer) -> dict[int, tuple]:
    return {
        number: (x.content, x.special, x.lstrip, x.rstrip, x.single_word, x.normalized)
        for number, x in t.get_added_tokens_decoder().items()
    }


def assert_equal(folder: str, theirs, seed: int) -> None:
    ours = HuggingFaceTokenizer(folder)
    for kind in ("bos", "eos"):
        theirs_of = getattr(theirs, f"{kind}_token"), getattr(theirs, f"{kind}_token_id")
        assert (getattr(ours, f"{kind}_token"), getattr(ours, f"{kind}_id")) == theirs_of
    assert added(ours.tokenizer) == added(theirs.backend_tokenizer)
    sample = texts(seed)
    for with_special in (False, True):
        wanted = theirs(sample, add_special_tokens=with_special).input_ids
        options = {"add_bos": False, "add_eos": False, "add_special_tokens": with_special}
        got = [ours.encode(text, **options) for text in sample]
        differing = [(t, a, b) for t, a, b in zip(sample, wanted, got, strict=True) if a != b]
        assert not differing, (len(differing), differing[0])


CHAT = [{"role": "user", "content": "hello<|end|>"}, {"role": "assistant", "content": "it's 12345"}]
TEMPLATE = "{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# Places of chat templates in a folder: file -> content.
TEMPLATES = {
    "file": {"chat_template.jinja": TEMPLATE},
    "older file": {"chat_template.json": json.dumps({"chat_template": TEMPLATE})},
    "config": {},
    "named files": {
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": f"{{{{ tools }}}}{TEMPLATE}",
    },
    "none": {},
}


EXPORTED = [name for name in ZOO if name not in REFUSED][::4]


@pytest.mark.parametrize(("seed", "name"), [*enumerate(EXPORTED)], ids=EXPORTED)
def test_tokenizer_of_an_export_is_that_of_its_base(seed, name, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    make, config, kind, files = ZOO[name]
    place = [*TEMPLATES][seed % len(TEMPLATES)]
    if place == "config" and config is not None:
        named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "t"}]
        config = config | {"chat_template": named if seed % 2 else TEMPLATE}
    write(base, make, config, kind, files)
    for file, content in TEMPLATES[place].items():
        (base / file).parent.mkdir(exist_ok=True)
        (base / file).write_text(content)
    theirs = transformers.AutoTokenizer.from_pretrained(base)
    ends = [i for i in (7, theirs.eos_token_id) if i is not None]
    model = tiny_hf_config("llama3", eos_token_id=ends, bos_token_id=theirs.bos_token_id).to_dict()
    (base / "config.json").write_text(json.dumps(model | files.get("config.json", {})))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "top_k": 3}))
    out.mkdir()
    args = from_hf_config(base).model_args
    write_model_files(str(out), args, str(base), torch.float32, HuggingFaceTokenizer(str(base)))

    again = transformers.AutoTokenizer.from_pretrained(out)
    assert added(again.backend_tokenizer) == added(theirs.backend_tokenizer)
    assert again.special_tokens_map == theirs.special_tokens_map
    assert again.chat_template == theirs.chat_template
    sample = texts(seed)[:200]
    for with_special in (False, True):
        wanted = theirs(sample, add_special_tokens=with_special).input_ids
        assert again(sample, add_special_tokens=with_special).input_ids == wanted
        shown = [t.batch_decode(wanted, skip_special_tokens=True) for t in (again, theirs)]
        assert shown[0] == shown[1]
    if theirs.chat_template is not None:
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            shown = [t.apply_chat_template(CHAT, tools, tokenize=False) for t in (again, theirs)]
            assert shown[0] == shown[1]
    for auto in (transformers.AutoConfig, transformers.GenerationConfig):
        stops, wanted = (auto.from_pretrained(folder).eos_token_id for folder in (out, base))
        assert stops == wanted == ends


@pytest.mark.parametrize("name", ZOO)
def test_folder_means_what_transformers_makes_of_it_or_is_refused(name, tmp_path):
    folder = write(tmp_path / "t", *ZOO[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if name not in REFUSED:
        assert_equal(folder, theirs, seed=len(name))
        return
    with pytest.raises(ValueError, match=REFUSED[name]) as refused:
        HuggingFaceTokenizer(folder)
    command = re.search('python -c "(.*?)"', str(refused.value))[1]
    kind = type(theirs).__name__
    try:
        exec(command.replace("NEW_FOLDER", str(tmp_path / "new")), {})
    finally:
        for cls in {*type(theirs).__mro__}:  # the command renames the class in its own process
            if cls.__name__ == "PreTrainedTokenizerFast":
                cls.__name__ = kind
    assert_equal(str(tmp_path / "new"), theirs, seed=1)


def test_generic_class_of_a_qwen_2_model_is_read_as_tokenizer_json_with_a_warning(tmp_path, caplog):
    """transformers 5 ignores the class of these models, and their own tokenizers have Qwen 2's rules."""
    files = {"config.json": {"model_type": "qwen2"}}
    ours = HuggingFaceTokenizer(write(tmp_path / "t", bpe, {}, OWN, files))
    assert added(ours.tokenizer) == added(bpe())
    assert "reads the tokenizer in" in caplog.text and "as a Qwen2Tokenizer" in caplog.text
    folder = write(tmp_path / "q", lambda: bpe(**QWEN), {}, OWN, files)
    assert_equal(folder, transformers.AutoTokenizer.from_pretrained(folder), seed=3)


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2TokenizerFast", OWN, "LlamaTokenizer"])
def test_vocabulary_and_merges_are_read_by_the_rules_of_their_class_or_refused(kind, tmp_path):
    make = (lambda: bpe(**QWEN)) if "Qwen2" in kind else bpe
    decoder = {"added_tokens_decoder": {"720": declared("<s>"), "721": declared("</s>")}}
    folder = write(tmp_path / "t", make, decoder, kind, {})
    model = json.loads((tmp_path / "t" / "tokenizer.json").read_text())["model"]
    (tmp_path / "t" / "tokenizer.json").unlink()
    (tmp_path / "t" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (tmp_path / "t" / "merges.txt").write_text("\n".join(merges) + "\n")
    if kind in ("GPT2Tokenizer", "Qwen2TokenizerFast"):
        assert_equal(folder, transformers.AutoTokenizer.from_pretrained(folder), seed=2)
        return
    with pytest.raises(FileNotFoundError, match="it needs tokenizer.json.*python -c"):
        HuggingFaceTokenizer(folder)
