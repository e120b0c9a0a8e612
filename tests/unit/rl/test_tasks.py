import json
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from torchtitan.experiments.rl_toy.tasks import CharTokenizer, CopyTask, SortTask, SumDigitsTask
from torchtitan.rl.function_pool import FunctionPool
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.jsonl_task import JsonlTask
from torchtitan.rl.tasks import Grade, Task, build_task, find_function, register_task


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def file_task(tmp_path, *lines, reward_fn=lambda text, answer: len(text), **options):
    """A task with these lines of a file, or with sums of two equal numbers."""
    lines = lines or [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    path = write_lines(tmp_path / "prompts.jsonl", *lines)
    return JsonlTask(path, reward_fn, CharTokenizer("0123456789+="), **options)


def rewards(task: Task, prompt_text: str, answer: str, *texts: str):
    prompt = task.make_prompt(prompt_text, answer)
    return [task.grade(prompt, text).reward for text in texts]


def test_sum_is_right_or_worth_nothing():
    task = SumDigitsTask(num_min=2, num_max=4, value_max=99)
    for prompt in task.sample(50):
        numbers = [int(number) for number in prompt.text.removesuffix("=").split("+")]
        assert 2 <= len(numbers) <= 4 and all(0 <= number <= 99 for number in numbers)
        assert prompt.answer == str(sum(numbers))
    assert rewards(task, "3+9=", "12", "12", "1", "012", "12=", "", "21") == [1, 0, 0, 0, 0, 0]


def test_copy_and_sort_are_worth_the_share_of_positions_that_are_right():
    assert rewards(CopyTask(), "cab=", "cab", "cab", "cba", "", "ca") == [1, 1 / 3, 0, 2 / 3]
    # Text after the answer lowers the reward.
    assert rewards(CopyTask(), "cab=", "cab", "cabcab") == [0.5]
    task = SortTask(length=5, num_letters=6)
    for prompt in task.sample(20):
        assert list(prompt.answer) == sorted(prompt.text[:-1])
        assert task.grade(prompt, prompt.answer).scores == {"exact": 1.0}
        assert set(prompt.answer) <= set("abcdef")


@pytest.mark.parametrize("task_cls", [SumDigitsTask, CopyTask, SortTask])
def test_task_continues_from_its_state_and_evaluates_on_the_same_prompts(task_cls):
    task, other = task_cls(seed=7), task_cls(seed=7)
    held_out = task.held_out(5)
    task.sample(3)
    state = json.loads(json.dumps(task.state_dict()))
    following = task.sample(4)
    other.load_state_dict(state)
    assert other.sample(4) == following
    assert other.held_out(5) == task.held_out(5) == held_out
    assert task_cls(seed=8).sample(10) != task_cls(seed=7).sample(10)


def test_char_tokenizer_has_no_text_for_its_eos_and_a_mark_for_foreign_ids():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.encode("ba", add_eos=True) == [2, 1, tokenizer.eos_id]
    assert tokenizer.decode([2, 0, 31]) == "b\ufffd"
    assert tokenizer.get_vocab_size() == 3
    with pytest.raises(ValueError, match=r"knows the characters 'ab', got \['c'\]"):
        tokenizer.encode("abc")
    with pytest.raises(ValueError, match="must differ"):
        CharTokenizer("aa")


# ---- prompts from a file ----


def test_each_pass_over_a_file_has_every_prompt_once_in_an_order_of_its_own(tmp_path):
    task = file_task(tmp_path)
    passes = [[prompt.text for prompt in task.sample(8)] for _ in range(3)]
    assert all(sorted(texts) == sorted(passes[0]) for texts in passes)
    assert passes[0] != passes[1] != passes[2]


def test_file_task_is_judged_by_the_users_function_whose_reward_must_be_a_number(tmp_path):
    returned = [0.5, None, float("nan"), "a lot", "1.5", [1.0]]
    task = file_task(tmp_path, reward_fn=lambda text, answer: returned.pop(0))
    grade = task.grade(task.prompt(0), "9")
    assert (grade.reward, grade.scores) == (0.5, {"exact": 0.0})
    while returned:
        with pytest.raises(ValueError, match="must return a finite number"):
            task.grade(task.prompt(0), "9")


PARTS = "tests.unit.rl.reward_functions:in_parts"
BAD_SCORES = ["nan", [1.0], {"a": 1.0}, "much", "1.5", None, 10**400]


@pytest.mark.parametrize("in_process", [False, True])
def test_reward_may_be_a_dict_with_its_total_and_named_scores(tmp_path, in_process):
    lines = [{"prompt": "1+1=", "answer": "2", "more": {"length": np.float32(3).item()}}]
    lines += [{"prompt": "1=", "answer": "1", "more": {"format": more}} for more in BAD_SCORES]
    lines += [{"prompt": "2=", "answer": "2", "without": "total"}]
    pool = FunctionPool(PARTS, 1, 60.0) if in_process else None
    task = file_task(tmp_path, *lines, reward_fn=find_function(PARTS), reward_pool=pool)
    first, *bad, without = task.held_out(9)
    grade = task.grade(first, "2")
    expected = {"exact": 1.0, "reward/format": 1.0, "reward/length": 3.0}
    failed = {"verifier_failed": 0.0} if in_process else {}
    assert (grade.reward, grade.scores) == (0.25, expected | failed)
    for prompt, score in zip(bad, BAD_SCORES, strict=True):
        words = f"score 'format' must be a finite number, .* got {re.escape(repr(score))}"
        with pytest.raises(ValueError, match=words.replace("'nan'", "nan")):
            task.grade(prompt, "1")
    words = r"must have the reward under 'total', got the keys 'format'; the completion was '9'"
    with pytest.raises(ValueError, match=words):
        task.grade(without, "9")
    task.close()


def test_task_may_grade_with_a_number_or_a_dict_and_scalars_of_libraries_are_numbers():
    class Graded(CopyTask):
        returns = None

        def grade(self, prompt, text):
            return self.returns

    task = Graded()
    numbers = [True, np.bool_(True), Decimal(1), Fraction(1), np.float32(1), torch.tensor(1)]
    for task.returns, expected in (
        *((number, Grade(1.0)) for number in numbers),
        *(({"total": 1, "x": number}, Grade(1.0, {"reward/x": 1.0})) for number in numbers),
        (0.5, Grade(0.5)),
        (Grade(1.0, {"exact": 1.0}), Grade(1.0, {"exact": 1.0})),
        ({"total": np.float64(2), "fluent": torch.tensor(0.5)}, Grade(2.0, {"reward/fluent": 0.5})),
    ):
        assert task.grade_all([(task.prompt(0), "abc")]) == [expected]
    for task.returns in (
        {"total": np.ones(2)},
        {"total": 1, 3: 1},
    ):
        words = "must be a finite number|must have strings as keys, got 3"
        with pytest.raises(ValueError, match=words):
            task.grade_all([(task.prompt(0), "abc")])


def test_file_to_evaluate_on_is_read_or_the_first_lines_serve(tmp_path):
    assert [p.text for p in file_task(tmp_path).held_out(2)] == ["0+0=", "1+1="]
    path = write_lines(tmp_path / "eval.jsonl", {"prompt": "7+1="})
    task = file_task(tmp_path, eval_path=path)
    assert [(p.text, p.answer) for p in task.held_out(9)] == [("7+1=", "")]


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, caplog):
    lines = {"prompt": "1+1="}, {"prompt": "1+2+3+4="}
    with caplog.at_level("WARNING"):
        task = file_task(tmp_path, *lines, max_prompt_tokens=4)
    assert "1 of 2 prompts" in caplog.text
    assert {prompt.text for prompt in task.sample(4)} == {"1+1="}
    with pytest.raises(ValueError, match="got none of 2"):
        file_task(tmp_path, *lines, max_prompt_tokens=3)


# ---- by name ----


def test_tasks_are_built_from_the_config(tmp_path):
    rl = JobConfig().rl
    rl.seed, rl.task.name, rl.task.length, rl.task.num_letters = 5, "sort", 4, 3
    expected = SortTask(length=4, num_letters=3, seed=5)
    assert build_task(rl).sample(3) == expected.sample(3)

    rl.task.name = "jsonl"
    rl.task.path = write_lines(tmp_path / "p.jsonl", {"prompt": "11"}, {"prompt": "1"})
    rl.task.reward_fn = "operator:eq"
    task = build_task(rl, CharTokenizer("1"), max_prompt_tokens=1)
    assert task.sample(1)[0].text == "1"
    with pytest.raises(ValueError, match="needs the model's tokenizer, got none"):
        build_task(rl)


def test_own_task_can_be_registered_once():
    def build(rl, tokenizer, max_prompt_tokens):
        return CopyTask(seed=rl.seed)

    register_task("test_own_copy", build)
    assert register_task("test_own_copy_too")(build) is build
    rl = JobConfig().rl
    for rl.task.name in ("test_own_copy", "test_own_copy_too"):
        assert isinstance(build_task(rl), CopyTask)
    with pytest.raises(ValueError, match="'copy' is registered already"):
        register_task("copy", build)


def test_answers_are_texts_or_numbers(tmp_path):
    def answers(*values):
        lines = [{"prompt": "1+1=", "answer": value} for value in values]
        return [prompt.answer for prompt in file_task(tmp_path, *lines).held_out(9)]

    assert answers("2", 2, 2.5, True) == ["2", "2", "2.5", "true"]
    for value in ({"a": 1}, [1], None):
        with pytest.raises(ValueError, match="line 2: rl.task.answer_key = 'answer' must name"):
            answers("2", value)
    path = tmp_path / "answers.jsonl"
    for line in ("[1]", '{"prompt": ""}', "{prompt}"):
        path.write_text('{"prompt": "1"}\n\n' + line + "\n")
        with pytest.raises(ValueError, match="answers.jsonl, line 3"):
            JsonlTask(str(path), len, CharTokenizer("1"))
