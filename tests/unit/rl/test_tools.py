"""The policy calls tools: it reads their results, and no failure of theirs stops a run."""

import json

import pytest

from tests.unit.data.chats import FORGETFUL, QWEN_LIKE, write_tokenizer
from tests.unit.rl import tool_functions
from tests.unit.rl.test_dialogues import Scripted, draw
from tests.unit.rl.toy import toy_config
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.rl.tasks import build_task
from torchtitan.rl.tools import Toolbox, ToolCall, calculator, schema_of, tool_calls

HERE = "tests.unit.rl.tool_functions"
TOOLS = ["torchtitan.rl.tools:calculator", f"{HERE}:divide", f"{HERE}:wait", f"{HERE}:die"]


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# question -> (the policy's first turn, the results that it reads after it)
SCRIPT = {
    "right": (call("calculator", expression="(2+3)*4"), ["20"]),
    "two at once": (
        "Both. " + call("divide", x=3) + call("calculator", expression="1/3"),
        ['{"quotient": 1.5}', "0.3333333333333333"],
    ),
    "cut": (call("divide", x=1, y=4).removesuffix("</tool_call>"), ['{"quotient": 0.25}']),
    "malformed": ("<tool_call>{'name': }</tool_call>", ["error: a call must be a JSON object, an"]),
    "no call": ("<tool_call>[1]</tool_call>", ['error: a call must be like {"name": "f", ']),
    "unknown": (call("rm"), ["error: there is no tool 'rm', only calculator, divide, wait, die"]),
    "arguments": (call("divide", z=1), ["error: TypeError: divide() got an unexpected keyword"]),
    "exception": (call("divide", x=1, y=0), ["error: ZeroDivisionError: "]),
    "code": (call("calculator", expression="open('x')"), ["error: ValueError: an expression has"]),
    "hangs": (call("wait", seconds=60), ["error: the tool took longer than 1 s"]),
    "dies": (call("die"), ["error: the tool's process ended (exit code 3)"]),
}


def policy(dialogue: str) -> str:
    """The script's call, then an answer that repeats the results."""
    question = dialogue.split("user\n", 1)[1].split("\nassistant\n")[0]
    results = dialogue.split("<tool_response>\n")[1:]
    if not results:
        return SCRIPT[question][0]
    return " and ".join(result.split("\n</tool_response>")[0] for result in results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tools") / "model", QWEN_LIKE)


def task_config(folder, rows, *overrides):
    path = folder.parent / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--rl.task.path={path}", "--rl.task.reward_fn=operator:eq", "--rl.task.name=jsonl"]
    tools = ["--rl.task.tool_timeout_seconds=1", f"--rl.task.tools={','.join(TOOLS)}"]
    return toy_config(folder.parent, *flags, "--rl.task.max_turns=3", *tools, *overrides).rl


def question(text: str, answer: str = "") -> dict:
    return {"prompt": [{"role": "user", "content": text}], "answer": answer}


def test_results_of_calls_are_read_in_the_next_turn_whatever_goes_wrong(folder, caplog):
    tokenizer = HuggingFaceTokenizer(str(folder))
    config = task_config(folder, [question(text, "20") for text in SCRIPT])
    task = build_task(config, tokenizer)
    more = [f"--rl.task.tools={TOOLS[0]}"]
    episodes = draw(task, Scripted(tokenizer, policy), folder.parent, *more)
    task.close()
    assert len(episodes) == len(SCRIPT)
    for episode, (first, results) in zip(episodes, SCRIPT.values(), strict=True):
        said = episode.text.split(" and ") if len(results) > 1 else [episode.text]
        for found, expected in zip(said, results, strict=True):
            assert found.startswith(expected)
        assert episode.reward == (episode.text == "20")
        assert episode.scores["turns"] == 2 and episode.scores["tool_calls"] == len(results)
        assert episode.turns[0] == first
        # The end of the turn was sampled; the text after it is the template's.
        reply = episode.turns[1]
        assert reply.startswith("\n<|im_start|>user\n<tool_response>\n")
        assert reply.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
        tokens = [*episode.prompt_token_ids, *episode.token_ids]
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert text == f"{episode.prompt}{first}<|im_end|>{reply}{episode.text}<|im_end|>"
    assert "the tool took longer than 1 s (rl.task.tool_timeout_seconds); the policy" in caplog.text
    # Tools are in the prompt, with their schemas; nothing stands before its first token.
    assert '"name": "calculator", "description": "Work out an arithmetic' in episodes[0].prompt
    assert episodes[0].prompt_token_ids[0] == tokenizer.token_to_id("<|im_start|>")


def test_arguments_that_cannot_travel_and_texts_that_cannot_be_encoded_are_results():
    box = Toolbox({f"{HERE}:echo": tool_functions.echo}, 1, 60.0)
    deep = "[" * 900 + "]" * 900  # which JSON reads, and pickle does not write
    texts = [deep, '"\\ud800"', "[1]"]
    calls = [f'<tool_call>{{"name": "echo", "arguments": {{"x": {text}}}}}' for text in texts]
    first, second, third = box.results([call for text in calls for call in tool_calls(text)])
    box.close()
    assert first.startswith("error: RecursionError: ")
    assert (second, third) == ("?", "a list")


def test_schema_is_that_of_the_signature():
    assert schema_of(tool_functions.divide, "m:divide") == {
        "type": "function",
        "function": {
            "name": "divide",
            "description": "Divide x by y.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x"],
            },
        },
    }

    def search(words: list[str], limit: int = 3) -> str: ...

    parameters = schema_of(search, "m:search")["function"]["parameters"]
    assert parameters["properties"]["words"] == {"type": "array", "items": {"type": "string"}}
    search.schema = {"type": "function", "function": {"name": "other"}}
    assert schema_of(search, "m:search") is search.schema
    for search.schema in (None, {}, {"name": "search"}, {"function": {"name": 3}}, {"f": str}):
        with pytest.raises(ValueError, match="`schema` of m:search must be a JSON object"):
            schema_of(search, "m:search")
    with pytest.raises(ValueError, match="the parameter 'x' of m:untyped must not be"):
        schema_of(tool_functions.untyped, "m:untyped")
    with pytest.raises(ValueError, match=r"must have different names, got \['divide', 'divide'\]"):
        Toolbox({"a:divide": tool_functions.divide, "b:divide": tool_functions.divide}, 1, 1.0)


def test_result_cannot_write_the_tokens_that_divide_a_chat(folder):
    tokenizer = HuggingFaceTokenizer(str(folder))
    config = task_config(folder, [question("a")], f"--rl.task.tools={HERE}:greet")
    task = build_task(config, tokenizer)
    said = iter([call("greet", who="you"), "done"])
    more = [f"--rl.task.tools={TOOLS[0]}"]
    (episode,) = draw(task, Scripted(tokenizer, lambda _: next(said)), folder.parent, *more)
    task.close()
    _, reply, last = episode.turns
    assert tool_functions.greet("you") in reply and last == "done"
    replied = [i for i, m in zip(episode.token_ids, episode.loss_mask, strict=True) if not m]
    assert tokenizer.decode(replied, skip_special_tokens=False) == reply
    start, end = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>"))
    # The template's: of the message with the result, and of the head of the answer.
    assert (replied.count(start), replied.count(end)) == (2, 1)


def test_calculator_works_out_what_python_does_and_knows_nothing_else():
    text = f"<think>x</think>{call('f', a='</b>')}\n{call('g')} <tool_call>"
    first, second, third = tool_calls(text)
    assert (first, second) == (ToolCall("f", {"a": "</b>"}), ToolCall("g", {}))
    assert third.problem.startswith("a call must be a JSON object") and tool_calls("no call") == []
    for expression, result in ("-(1 + 2) * 3 % 4", "3"), ("7 // 2 / 2", "1.5"), ("+1e3", "1000.0"):
        assert calculator(expression) == result
    for expression in ("2**9", "a", "f(1)", "True", "'a'*3", "[1][0]", "1 if 1 else 2"):
        with pytest.raises(ValueError, match="an expression has numbers"):
            calculator(expression)


def test_chats_that_cannot_be_rendered_are_told(folder, tmp_path, caplog):
    tokenizer = HuggingFaceTokenizer(str(folder))
    plain = HuggingFaceTokenizer(str(write_tokenizer(tmp_path / "plain")))
    path = tmp_path / "template"
    hello = "{{ ['Hi', 'Hello'] | random }} {{ messages[0].content }}"
    without_tools = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    one, king = [question("a")], [{"prompt": [{"role": "king", "content": ""}]}]
    must = "line 2: rl.task.prompt_key = .* must name a list of messages, because of rl.task.tools"
    for rows, with_tokenizer, template, message in [
        (one, plain, "", "has no chat template; set rl.task.chat_template"),
        ([*one, {"prompt": "b"}], tokenizer, "", must),
        ([{"prompt": ["b"]}], tokenizer, "", "line 1: a message must be an object with a role"),
        (king, tokenizer, "", "no such role: king"),
        (one, tokenizer, FORGETFUL, "template writes the"),
        (one, tokenizer, hello, "line 1: .*template cannot render .*: random texts"),
    ]:
        path.write_text(template)
        flags = [f"--rl.task.chat_template={path}"] if template else []
        with pytest.raises(ValueError, match=message):
            build_task(task_config(folder, rows, *flags), with_tokenizer)
    path.write_text(without_tools)
    build_task(task_config(folder, one, f"--rl.task.chat_template={path}"), tokenizer).close()
    assert "template does not read `tools`, so prompts do not describe rl.task" in caplog.text


def test_chat_prompts_need_no_tools_and_take_variables(folder):
    rows = [question("2+2?", "4"), {"prompt": "plain"}]
    config = task_config(folder, rows, '--rl.task.chat_variables={"enable_thinking": false}')
    config.task.tools = []
    task = build_task(config, HuggingFaceTokenizer(str(folder)))
    chat, plain = task.held_out(2)
    assert chat.text == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert plain.text == "plain" and not task.replies
