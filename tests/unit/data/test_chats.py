"""Chats as ids and labels: the labels of small templates worked out by hand, and what is refused."""

import bz2
import datetime
import gzip
import json
import logging
import lzma
import pickle
from itertools import groupby

import pyarrow
import pyarrow.parquet
import pytest

from tests.reference.chat_formats import without_marks
from tests.unit.data.chats import QWEN_LIKE, write_tokenizer
from torchtitan.data.chat_samples import load_chats, parse_keys
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.chats import ChatEncoder, ChatTokens
from torchtitan.data.document_sources import Source
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.row_streams import Packing
from torchtitan.data.tokenizer import HuggingFaceTokenizer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4ü\n"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("model"))))


def encoder_of(tokenizer, source=PLAIN):
    return ChatEncoder(tokenizer, ChatTemplate(source, "t.jinja", {}, tokenizer.special_tokens))


def parts(tokenizer, encoded):
    """Return the text with brackets around each run of trained tokens."""
    text = ""
    for is_trained, run in groupby(zip(*encoded, strict=True), lambda token: token[1]):
        decoded = tokenizer.decode([int(token) for token, _ in run], skip_special_tokens=False)
        text += f"[{decoded}]" if is_trained else decoded
    return text


TURNS = (
    "<system>s<|im_end|>\n<user>2+2?<|im_end|>\n<assistant>[4ü\n<|im_end|>]\n"
    "<user>3+3?<|im_end|>\n<assistant>[<|im_end|>]\n"
)
NESTED = (
    "{% macro turn(m) %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{% for letter in m.content %}{{ letter }}{% endfor %}{% set x = 1 %}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ x }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
OF_MARKS = [CHAT[1] | {"content": "\ufdd1"}, {"role": "assistant", "content": "\ufdd2\ufdd1\ufdd3"}]
THOUGHT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4!"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "<think>\nha\n</think>\n\n6"},
]
# (template, chat, its text with brackets around each run of trained tokens)
SHOWN = {
    "prefixes": (PLAIN, CHAT, TURNS),
    "marks": (MARKED, CHAT, TURNS),
    "marks in macros and loops": (NESTED, CHAT[1:4], "<user>2+2?<assistant>[4ü\n]<user>3+3?"),
    "no token ends a turn": (ENDLESS, CHAT[1:3], "user: 2+2?\n\nassistant: [4ü\n\n\n]"),
    "thinking that later turns lose": (
        without_marks(QWEN_LIKE), THOUGHT, (
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[4!<|im_end|>]\n<|im_start|>user\n"
            "3+3?<|im_end|>\n<|im_start|>assistant\n[<think>\nha\n</think>\n\n6<|im_end|>]\n")),
    "text with the characters that mark generation": (
        MARKED, OF_MARKS, "<user>\ufdd1<|im_end|>\n<assistant>[\ufdd2\ufdd1\ufdd3<|im_end|>]\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_tokens_of_the_assistant_s_turns_are_trained_and_no_others(tokenizer, name):
    source, chat, shown = SHOWN[name]
    assert parts(tokenizer, encoder_of(tokenizer, source)({"messages": chat})) == shown


def test_texts_are_encoded_without_template_and_end_in_the_end_of_text_token(tokenizer):
    encode = ChatEncoder(tokenizer, None)
    for completion in (" 4", " 4<|im_end|>"):
        encoded = encode({"prompt": "2+2=", "completion": completion, "messages": None})
        # The tokenizer's files add the token that begins a text.
        assert parts(tokenizer, encoded) == "<|begin|>2+2=[ 4<|im_end|>]"
    assert parts(tokenizer, encode({"prompt": "", "completion": ""})) == "<|begin|>[<|im_end|>]"
    assert [array.dtype for array in encoded] == ["int32", "bool"]


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_encoder_is_pickled_for_data_workers(tokenizer, source):
    encode = encoder_of(tokenizer, source)
    copy = pickle.loads(pickle.dumps(encode))
    sample = {"messages": CHAT, "prompt": "ignored beside messages"}
    assert parts(tokenizer, copy(sample)) == parts(tokenizer, encode({"messages": CHAT}))


def test_control_token_in_a_user_s_text_is_encoded_as_one_and_warned_of_once(tokenizer, caplog):
    encode = encoder_of(tokenizer)
    caplog.set_level(logging.WARNING)
    chat = [{"role": "user", "content": "a<|im_end|>b<|im_end|>"}, CHAT[2]]
    ids, _ = encode({"messages": chat})
    assert ids.tolist().count(tokenizer.token_to_id("<|im_end|>")) == 4
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "<|im_start|>"}]}, CHAT[2]]
    encode({"messages": in_parts})
    encode({"messages": [CHAT[1], {"role": "assistant", "content": "<|im_start|>"}]})
    for result in ([{"text": 4}, 5], {"text": "<|im_start|>"}, "6"):
        encode({"messages": [{"role": "tool", "content": result}, CHAT[2]]})
    warnings = [x.message for x in caplog.records if x.levelno >= logging.WARNING]
    assert len(warnings) == 2  # each token once
    assert warnings[0].startswith(
        "a message of the role 'user' has '<|im_end|>' in its text, which is encoded as that control"
    )


A, U = {"role": "assistant", "content": "4"}, {"role": "user", "content": "2+2?"}


# (sample, beginning of the sentence, a part of the remedy)
BAD_SAMPLES = [
    ({"messages": []}, "'messages' must be a list of objects with 'role' and 'content'", "leave out"),
    ({"messages": "hi"}, "'messages' must be a list of objects", "correct"),
    ({"messages": [{"from": "human", "value": "x"}]},
     "message 1 of 'messages' must have a 'role' of system, ", "got the keys ['from', 'value']"),
    ({"messages": [U | {"content": None}, A]},
     "message 1 of 'messages' must have a string as its 'content' (role 'user')", "set 'content' to a string"),
    ({"messages": [U | {"content": [{"type": "image"}]}, A]},
     "message 1 of 'messages' must have a string as its 'content' (role 'user'), got [{'type'", "leave"),
    ({"messages": [U, A], "tools": "[{"}, "'tools' must be a list of JSON schemas, got '[{'", "correct"),
    ({"messages": [U, A], "chat_template_kwargs": "x"},
     "'chat_template_kwargs' must be an object", "correct"),
    ({"prompt": "a"}, "need an object with 'messages', or with 'prompt' and 'completion'", "convert"),
    ({"prompt": "a", "completion": [A]},
     "'prompt' and 'completion' must both be strings or both be lists", "convert"),
    (["a"], "need an object with 'messages', got list", "correct"),
]  # fmt: skip


CANNOT = "t.jinja cannot render the chat: "
UNMARKED = "t.jinja has no {% generation %} marks, and "
MARKS = "t.jinja has its {% generation %} marks around the wrong text ("
LOOP = "{% for m in messages %}BODY{% endfor %}"
X = A | {"content": "x"}
# (template, chat, beginning of the sentence, a part of the remedy)
BAD_TEMPLATES = [
    ("{{ raise_exception('must alternate') }}", [U, A], CANNOT + "must alternate", "correct the chat"),
    ("{{ strftime_now('%d') }}", [U, A], CANNOT + "'strftime_now' is undefined", "with a fixed date"),
    # Nothing says where a reply begins.
    ("{{ messages | length }}{{ messages[1:] }}", [U, A],
     UNMARKED + "renders the header of the assistant's turn in message 2 differently", "{% endgeneration %}"),
    # The header of the next turn is longer than this turn.
    (LOOP.replace("BODY", "<{{ m.content }}") + "{% if add_generation_prompt %}<x{% endif %}", [U, X, A],
     UNMARKED + "renders the header of the assistant's turn in message 3 diff", "training.chat_template"),
    ("{{ messages[1].role.upper() }}" + PLAIN, [U, A],
     UNMARKED + "cannot render the chat up to message 1 (", "training.chat_template"),
    # A reply has another closing token once the chat goes on.
    (PLAIN.replace("<|im_end|>",
                   "{{ '<|im_start|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"), [U, A, U],
     UNMARKED + "renders the assistant's turn in message 2 differently when the chat goes on (", "set training"),
    (LOOP.replace("BODY", "{{ m.content }}"), [A],
     "every token of the chat would be trained, because t.jinja writes nothing outside", "writes a header"),
    (LOOP.replace("BODY",
                  "{% set x %}{% generation %} {{ m.content }}{% endgeneration %}{% endset %}{{ x | trim }}"), [A],
     "t.jinja changes the text of a {% generation %} block after", "write the changed text in the block"),
    (LOOP.replace("BODY", "{{ m.content }}{% generation %}{% endgeneration %}"), [U, A], MARKS + "'')", "put them around the assistant"),
    (LOOP.replace("BODY", "{% generation %}<{{ m.role }}>{{ m.content }}{% endgeneration %}"), [U, A],
     MARKS + "'<user>what the user asked", "put them around"),
    (MARKED.replace("'assistant' %}", "'assistant' and m.content != '4' %}"), [U, A],
     "no token of the chat is trained: t.jinja writes nothing in the assistant's", "training.chat_template"),
]  # fmt: skip


REFUSED = [(PLAIN, *case) for case in BAD_SAMPLES]
REFUSED += [(source, {"messages": chat}, *more) for source, chat, *more in BAD_TEMPLATES]


@pytest.mark.parametrize("source, sample, problem, remedy", REFUSED)
def test_bad_samples_and_templates_are_refused_in_a_sentence(
    tokenizer, source, sample, problem, remedy
):
    with pytest.raises(ValueError) as error:
        encoder_of(tokenizer, source)(sample)
    sentence = str(error.value)
    assert sentence.startswith(problem) and remedy in sentence.removeprefix(problem)
    assert "\n" not in sentence and len(sentence) < 600


def test_tokenizer_without_template_or_end_token_names_the_keys(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="^the tokenizer in .* has no chat template; set tr"):
        ChatEncoder.of_tokenizer(tokenizer)({"messages": [U, A]})
    bare = HuggingFaceTokenizer(str(write_tokenizer(tmp_path, eos_token=None)))
    encode = ChatEncoder(bare, None)
    assert parts(bare, encode({"prompt": "2", "completion": "3"})) == "<|begin|>2[3]"
    with pytest.raises(ValueError, match="^'completion' is empty .*set training.eos_token"):
        encode({"prompt": "2", "completion": ""})


# ---- files ----

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
ROWS = [
    {"messages": [U | {"name": "u"}, CALL], "id": 1},
    {"messages": [U, A], "tools": [{"name": "f", "parameters": {"b": {"type": "x"}}}]},
]
# What libraries that guess types change: nulls, numbers, dates, texts that are JSON.
for content, arguments in [
    ("4.", {"n": 1, "x": None}),
    ("2024-05-01", {"n": 1.5}),
    ('{"a": 22.50}', {}),
]:
    answer = {"role": "assistant", "content": content, "tool_calls": [{"arguments": arguments}]}
    ROWS.append({"messages": [U, answer]})


@pytest.mark.parametrize("packing", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_rows_of_every_kind_of_file_are_those_that_were_written(kind, packing, tmp_path):
    path = tmp_path / "chats" / f"chats.{kind}{packing}"
    path.parent.mkdir()
    text = "\r\n".join(json.dumps(row) + "\n" for row in ROWS)
    content = (json.dumps(ROWS) if kind == "json" else text).encode("utf-8-sig")
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(
        packing, bytes
    )
    # Tools write large files as several streams, one after the other.
    path.write_bytes(compress(content[:500]) + compress(content[500:]))
    if packing == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)
    chats = load_chats(str(path))
    assert [chats[i] for i in range(len(chats))] == ROWS
    assert chats.where(1) == f"{path}, {'entry 2' if kind == 'json' else 'line 3'}"
    (tmp_path / "chats" / f"more.json{packing}").write_bytes(path.read_bytes())
    assert len(load_chats(str(path.parent))) == 2 * len(ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    if packing:
        with pytest.raises(ValueError, match=f"chats.{kind}{packing} cannot be unpacked: "):
            load_chats(str(path))


def test_rows_of_parquet_have_the_columns_that_are_read(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "chats.parquet"
    columns = {key: [row.get(key) for row in ROWS[:2]] for key in ("messages", "tools", "id")}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    chats = load_chats(str(path))
    read = [{key: row[key] for key in ("messages", "tools") if key in row} for row in ROWS[:2]]
    assert [chats[i] for i in range(len(chats))] == read
    assert chats.where(1) == f"{path}, row 2"
    assert "keys whose value is null are left out" in caplog.text
    messages = [{"role": "user", "content": "x", "at": datetime.datetime(2024, 5, 1)}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [messages]}), path)
    with pytest.raises(ValueError, match="row 1: Object of type datetime .* convert the column to"):
        load_chats(str(path))


def test_file_with_other_rows_or_of_another_kind_is_refused_with_its_place(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    half = json.dumps({"messages": [U, A | {"content": "\ud83d"}]})
    of_pair = json.dumps({"prompt": "a", "completion": "\ud83d"})
    lines = ['{"messages": [1]}', "[", half, '"x"', of_pair]
    path.write_text("\n".join(lines))
    chats = Source("chat", load_chats(str(path)), encoder_of(tokenizer), tokenizer)
    for index, sentence in [
        (0, "line 1: 'messages' must be a list of objects"),
        (1, "line 2: not valid JSON .*every line must be one object"),
        (2, "line 3: the text has half of a surrogate pair, '.ud83d'"),
        (3, "line 4: need an object with 'messages', got str"),
        (4, "line 5: the text has half of a surrogate pair, '.ud83d'"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            chats.read(index)
    (tmp_path / "chats.txt").write_text("x")
    with pytest.raises(ValueError, match=r"one kind \(JSON, Parquet\), got"):
        load_chats(str(tmp_path / "chats.txt"))
    with pytest.raises(ValueError, match="this training.dataset needs training.dataset_path"):
        load_chats("")


# GLM's: the token of the next turn stops generation.
NO_END = (
    "{% for m in messages %}{{ {'user': '<|im_start|>', 'assistant': '<|begin|>', 'tool': '<|im_end|>'}[m.role] }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|begin|>{% endif %}"
)


def test_token_of_the_next_turn_is_trained_where_turns_have_no_end(tokenizer, caplog):
    caplog.set_level("INFO")
    encode = encoder_of(tokenizer, NO_END)
    result = {"role": "tool", "content": "r"}
    chat = {"messages": [U, A, result, A, U, A]}
    assert parts(tokenizer, encode(chat)) == (
        "<|im_start|>2+2?<|begin|>[4<|im_end|>]r<|begin|>[4<|im_start|>]2+2?<|begin|>[4<|im_start|>]"
    )
    assert "a trained turn of the assistant ends with '<|im_start|>'" in caplog.text


@pytest.mark.parametrize(
    "source",
    [NO_END.replace("'<|im_start|>'", "'U'"), MARKED.replace("<|im_end|>{% endg", "{% endg")],
)
def test_template_whose_turns_never_end_is_warned_about_at_the_start(tokenizer, source, caplog):
    encoder_of(tokenizer, source)
    assert "no token that ends the assistant's turn is trained" in caplog.text


@pytest.mark.parametrize("source", [PLAIN, MARKED])
@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "loss_mask"])
def test_turn_that_a_key_leaves_out_of_the_loss_is_not_trained(tokenizer, source, key):
    wrong = {"role": "assistant", "content": "5", key: 0}
    right = {"role": "assistant", "content": "4", key: True}
    ids, trained = encoder_of(tokenizer, source)({"messages": [U, wrong, U, right]})
    assert tokenizer.decode(ids[trained].tolist(), skip_special_tokens=False) == "4<|im_end|>"
    with pytest.raises(ValueError, match=f"message 2 has '{key}' = 0.5, which must be 0, 1"):
        encoder_of(tokenizer, source)({"messages": [U, {**wrong, key: 0.5}]})


def test_content_that_is_a_list_of_one_text_is_that_text_for_a_template_of_texts(tokenizer):
    encode = encoder_of(tokenizer, PLAIN)
    listed = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (U, A)]
    wanted = parts(tokenizer, encode({"messages": [U, A]}))
    assert parts(tokenizer, encode({"messages": listed})) == wanted
    listed[0]["content"] *= 2
    with pytest.raises(ValueError, match="needs strings, and .* list of several parts; join"):
        encode({"messages": listed})


def test_arguments_of_a_tool_call_that_are_quoted_or_refused_are_told(tokenizer, caplog):
    write = "{% for c in m.tool_calls %}{{ c.function.arguments VERB }}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    chat = {"messages": [U, {"role": "assistant", "content": "x", "tool_calls": [call]}]}
    quoting = PLAIN.replace("{{ m.content }}", write.replace("VERB", "| tojson"))
    encoder_of(tokenizer, quoting)(chat)
    assert "'arguments', which is a string, as a quoted JSON string" in caplog.text
    call["function"]["arguments"] = {"city": "Paris"}
    joining = PLAIN.replace("{{ m.content }}", write.replace("VERB", "+ ''"))
    with pytest.raises(ValueError, match="to a string: give 'arguments' as a JSON string"):
        encoder_of(tokenizer, joining)(chat)


def test_template_for_tools_in_a_file_of_its_own_is_used(tmp_path):
    folder = write_tokenizer(tmp_path / "model", "not this one")
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T" + PLAIN)
    encode = ChatEncoder.of_tokenizer(HuggingFaceTokenizer(str(folder)))
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = ({}, {"tools": []}, {"tools": tools}, {"tools": json.dumps(tools)})
    plain, *lengths = (len(encode({"messages": [U, A]} | more)[0]) for more in given)
    assert lengths == [plain + 1] * 3


def test_chats_that_are_left_out_leave_no_lane_without_chats(tokenizer):
    short, long = ({"messages": [{**U, "content": text}, A]} for text in ("x", "x" * 99))
    encode = ChatTokens(encoder_of(tokenizer, PLAIN), 64, "skip")
    source = Source("chat", [short, short, long, short], encode, tokenizer)
    dataset = PackedDataset([source], Packing("none", 64), infinite=True, rows=4)
    dataset.log_chats()
    rows = [row for row, _ in zip(dataset, range(8), strict=False)]
    assert [int(row["sample_ids"][0]) for row, _ in rows] == [0, 1, 2, 0, 1, 2, 0, 1]


SHARE_GPT = ["conversations=messages", "from=role", "value=content", "human=user", "gpt=assistant"]
ALPACA = ["system=system", "instruction=user", "input=user", "output=assistant"]


@pytest.mark.parametrize(
    ("entries", "row"),
    [
        (SHARE_GPT, {"conversations": [{"from": "human", "value": "2+2?\n\nNow."}, {"from": "gpt", "value": "4"}]}),
        (ALPACA, {"instruction": "2+2?", "input": "Now.", "output": "4", "system": ""}),
        (ALPACA, {"instruction": "2+2?\n\nNow.", "output": "4", "input": None}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_with_other_names_are_the_chats_that_the_named_keys_make(
    entries, row, kind, tokenizer, tmp_path
):
    path = tmp_path / f"chats.{kind}"
    path.write_text(json.dumps(row) + "\n")
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    keys = parse_keys(entries)
    template = ChatTemplate(PLAIN, "t.jinja", {}, tokenizer.special_tokens)
    encode = ChatEncoder(tokenizer, template, keys=keys)
    wanted = {"messages": [{"role": "user", "content": "2+2?\n\nNow."}, {**A, "content": "4"}]}
    got = encode(load_chats(str(path), keys)[0])
    assert parts(tokenizer, got) == parts(tokenizer, encoder_of(tokenizer)(wanted))
    with pytest.raises(ValueError, match="name yours in training.chat_keys"):
        encoder_of(tokenizer)(load_chats(str(path))[0])


def test_name_that_no_chat_has_is_refused():
    with pytest.raises(ValueError, match="training.chat_keys .* got 'from=rol'.*role"):
        parse_keys(["from=rol"])
