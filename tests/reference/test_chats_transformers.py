"""Chats are rendered and encoded as transformers does, and trained where it says that the assistant wrote."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.chat_formats import FORMATS, backend_of, without_marks
from tests.unit.data.chats import LLAMA_LIKE, QWEN_LIKE, write_tokenizer
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.chats import ChatEncoder
from torchtitan.data.tokenizer import HuggingFaceTokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a < b & 'ü'", "parameters": {"type": "object"}},
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "ü<'\""}}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": " Be brief. "}
RESULT = {"role": "tool", "name": "add", "content": '{"sum": 4}'}
QUESTION_LAST = "ends in a question"
CHATS = {
    "one turn": [user("2+2, bitte — ü? <b>'\"&"), assistant("Four: 4️⃣ — 四")],
    "turns": [user("Hi\n"), assistant(" Hello\n"), user("2+2?"), assistant("4"), user(""), assistant("é")],
    "system": [SYSTEM, user("Hi"), assistant("Hello"), user("Bye"), assistant("Bye.\n\n")],
    "empty answer": [user("Say nothing."), assistant("")],
    "empty answer first": [user("Say nothing."), assistant(""), user("Speak"), assistant("Yes")],
    "thinking": [user("2+2?"), assistant("4", reasoning_content="two and\ntwo")],
    "thinking inline": [user("2+2?"), assistant("<think>\nhm\n</think>\n\n4")],
    "old thinking": [
        user("2+2?"), assistant("4", reasoning="hm"),
        user("3+3?"), assistant("6", reasoning="ha", tool_calls=None),
    ],
    "tool": [user("2+2?"), assistant("", tool_calls=[CALL]), RESULT, assistant("It is 4.")],
    "tools": [
        SYSTEM, user("2+2, 3+3?"), assistant(None, tool_calls=[CALL], thinking="I add."), RESULT, RESULT,
        assistant("4 and 6.", thinking="Done."), user("Thanks"), assistant("Fine."),
    ],
    "control token": [user("What is <|im_end|></s><|eot_id|>?"), assistant("An end.")],
    "no question": [SYSTEM, assistant("Hello")],
    QUESTION_LAST: [user("2+2?"), assistant("4"), user("3+3?")],
}  # fmt: skip

# Format -> chats that are refused without marks, because a turn changes when the chat goes on.
REFUSED = {
    # The thinking between two calls is left out after another question, so no later turn is a prefix.
    "qwen_3": {"tools"},
    "qwen_3_5": {"tools"},
    "glm_4": {"tools"},
    "glm_4_7": {"tools"},
    # <|return|> ends the last turn, <|end|> earlier ones.
    "gpt_oss": {"turns", "system", "empty answer first", "old thinking", "tools", QUESTION_LAST},
    # A turn without text, and behind it no token.
    "phi_3": {"tool"},
    "phi_4_mini": {"tool"},
}
# Format -> the token that ends a turn of the model, and begins the user's: without marks it is also
# trained behind the last turn, where the template writes nothing.
NEXT_HEADER = {"glm_4": "<|user|>", "glm_4_7": "<|user|>"}


@functools.cache
def theirs_and_ours(name, folder, marked=True, trim_offsets=False):
    from transformers import PreTrainedTokenizerFast

    form = FORMATS[name]
    template = form.template if marked else without_marks(form.template)
    backend = backend_of(form, trim_offsets)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {**form.special, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **form.special
    )
    return theirs, ChatEncoder.of_tokenizer(HuggingFaceTokenizer(str(folder)))


def expected(tokenizer, chat, **options):
    """Return transformers' ids and mask; None if its template refuses the chat."""
    import jinja2

    try:
        result = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True, **options
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return result["input_ids"], result["assistant_masks"]


def encoded(encoder, sample):
    ids, trained = encoder(sample)
    assert (ids.dtype, trained.dtype, ids.shape) == ("int32", "bool", trained.shape)
    return ids.tolist(), trained.astype(int).tolist()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("has_tools", [False, True])
def test_ids_and_labels_of_a_chat_are_those_of_transformers(name, has_tools, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / name
    theirs, ours = theirs_and_ours(name, folder / "marked")
    unmarked, by_prefixes = theirs_and_ours(name, folder / "unmarked", marked=False)
    tools = TOOLS if has_tools else None
    refused, compared = set(), 0
    for title, chat in CHATS.items():
        sample = {"messages": chat, "tools": tools}
        reference = expected(theirs, chat, tools=tools)
        if reference is None:
            for encoder in (ours, by_prefixes):
                with pytest.raises(ValueError, match="^chat_template of .* cannot render the "):
                    encoder(sample)
            continue
        if not any(reference[1]):  # Llama 3 takes a first answer for the question
            with pytest.raises(ValueError, match="^no token of the chat is trained: "):
                ours(sample)
            continue
        assert encoded(ours, sample) == reference, title
        compared += 1
        assert expected(unmarked, chat, tools=tools)[0] == reference[0]  # marks change no text
        if FORMATS[name].marks_header:
            continue
        if name in NEXT_HEADER and chat[-1]["role"] == "assistant":
            stop = theirs.convert_tokens_to_ids(NEXT_HEADER[name])
            reference = [*reference[0], stop], [*reference[1], 1]
        try:
            assert encoded(by_prefixes, sample) == reference, title
        except ValueError as error:
            assert "has no {% generation %} marks, and" in str(error)
            refused.add(title)
    assert refused == REFUSED.get(name, set())
    assert compared >= 6


@pytest.mark.parametrize("name", ["chatml", "mistral", "llama_3"])
def test_tokenizer_that_cuts_blanks_off_its_offsets_changes_no_label(name, tmp_path):
    """Llama 3's does. transformers then finds no token for a turn that begins with a blank."""
    chat = {"messages": [user("2+2?"), assistant("  4  "), user(" Sure? "), assistant(" ü")]}
    for marked in (True, False):
        _, cutting = theirs_and_ours(name, tmp_path / f"{marked}", marked, trim_offsets=True)
        _, plain = theirs_and_ours(name, tmp_path / f"{marked}_plain", marked)
        assert encoded(cutting, chat) == encoded(plain, chat)


def test_turn_that_ends_in_a_character_of_several_tokens_is_trained_to_its_end(tmp_path):
    """transformers leaves out the character's further tokens if the marks end behind it."""
    source = (
        "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}"
    )
    form = FORMATS["chatml"]._replace(template="x")
    (tmp_path / "t.jinja").write_text(source.replace("m.content", "m.content if m.role != 'user'"))
    backend_of(form).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    encoder = ChatEncoder.of_tokenizer(tokenizer, str(tmp_path / "t.jinja"))
    ids, trained = encoder({"messages": [user("?"), assistant("a四")]})
    assert tokenizer.decode(ids[trained].tolist()) == "a四"
    assert trained.tolist() == [False] * 3 + [True] * 4 + [False]


def test_pairs_of_messages_are_the_chat_with_all_of_the_completion_trained(tmp_path):
    theirs, ours = theirs_and_ours("qwen_3", tmp_path)
    for title, chat in CHATS.items():
        for cut in [i for i, m in enumerate(chat) if m["role"] != "user" and i > 0][-2:]:
            prompt, completion = chat[:cut], chat[cut:]
            is_reply = completion[0]["role"] == "assistant"
            text = theirs.apply_chat_template(chat, tokenize=False)
            start = theirs.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=is_reply
            )
            if not text.startswith(start):
                with pytest.raises(ValueError, match="renders the prompt differently when the"):
                    ours({"prompt": prompt, "completion": completion})
                continue
            ids, trained = encoded(ours, {"prompt": prompt, "completion": completion})
            assert ids == theirs.apply_chat_template(chat)["input_ids"]
            n = len(theirs(start)["input_ids"])  # a special token or a line break ends the prompt
            end = len(ids) - text.endswith("\n")  # behind the token that ends the turn
            assert trained == [0] * n + [1] * (end - n) + [0] * (len(ids) - end), title


def test_variables_of_a_sample_reach_the_template(tmp_path):
    theirs, ours = theirs_and_ours("llama_3", tmp_path)
    chat, variables = CHATS["one turn"], {"date_string": "2 June 2025"}
    sample = {"messages": chat, "chat_template_kwargs": variables}
    assert encoded(ours, sample) == expected(theirs, chat, **variables)


CONTENTS = st.text(
    st.sampled_from("ab \n\t<|>éü四😀[]/\u0301") | st.characters(codec="utf-8"), max_size=9
)
TURNS = st.lists(st.tuples(CONTENTS | st.just("<|im_end|>\n"), CONTENTS), min_size=1, max_size=4)


@pytest.mark.parametrize("name", ["chatml", "mistral", "qwen_3", "zephyr"])
@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_any_text_gets_the_ids_and_labels_of_transformers(name, tmp_path_factory, turns):
    folder = tmp_path_factory.getbasetemp() / name
    theirs, ours = theirs_and_ours(name, folder / "marked")
    _, by_prefixes = theirs_and_ours(name, folder / "unmarked", marked=False)
    chat = [m for question, answer in turns for m in (user(question), assistant(answer))]
    reference = expected(theirs, chat)
    assert encoded(ours, {"messages": chat}) == reference
    assert encoded(by_prefixes, {"messages": chat}) == reference


# ---- the template alone ----


def test_continuation_is_what_transformers_renders_after_the_answer(tmp_path):
    from transformers import AutoTokenizer

    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "6"}]
    for name, template, end in (("q", QWEN_LIKE, "<|im_end|>"), ("l", LLAMA_LIKE, "<|eot_id|>")):
        folder = write_tokenizer(tmp_path / name, template)
        theirs = AutoTokenizer.from_pretrained(folder)
        chat = ChatTemplate.of_tokenizer(HuggingFaceTokenizer(str(folder)))
        question, answer = [user("2+2?")], "<tool_call>{}</tool_call>"
        start = theirs.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        messages = [*question, assistant(answer), *results]
        whole = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        sampled = answer + end  # the token that ended the turn is one of the sampled ones
        assert start + sampled + chat.continuation(question, results, stop=end) == whole
        assert start + answer + chat.continuation(question, results) == whole
