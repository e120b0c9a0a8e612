"""The commands on models from outside, against transformers and peft."""

import io
import json
import os
import re
import runpy
import shutil
import sys
from importlib.resources import files

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_hf import tiny_hf_model
from tests.unit.tools.test_storage import ReadOnly
from torchtitan import commands
from torchtitan.commands.generate import pieces_of
from torchtitan.commands.source import job_of, weights_in, with_model
from torchtitan.config import ConfigManager
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.tools import events
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long
TOKENIZER = files("torchtitan") / "assets/tokenizer"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """A tiny Qwen 3 with a tokenizer, a chat template and two tokens that end a text."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_hf_model("qwen3", vocab_size=2050)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        replace_extra_special_tokens=False,
    )
    tokenizer.chat_template = CHATML
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 1999]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """A function: runs a command in this process, and returns (stdout, stderr)."""

    def run_command(*arguments, stdin="", codes=(0,)):
        logger.handlers, logger.propagate = [], True  # as in a process of its own
        monkeypatch.setattr(sys, "argv", ["torchtitan", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            commands.main()
        except SystemExit as stopped:
            code = stopped.code
        out, err = capsys.readouterr()
        assert code in codes, (code, out, err)
        return out, err

    return run_command


SHORT = ["--prompt=Return a list", "--max_new_tokens=8", "--temperature=0"]


def model_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy(folder, ids, n, **options):
    """Return the new tokens of transformers' greedy generation."""
    tokens = model_of(folder).generate(
        torch.tensor([ids]), max_new_tokens=n, do_sample=False, **options
    )
    return tokens[0, len(ids) :].tolist()


def encode(folder, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]


def test_greedy_text_of_each_prompt_is_that_of_transformers(hf_folder, run, tmp_path):
    (tmp_path / "prompts.txt").write_text("A class\n")
    out, _ = run("generate", hf_folder, f"--prompts={tmp_path}/prompts.txt", "--out", *SHORT)
    responses = json.loads(out)["responses"]
    for response, prompt in zip(responses, ["Return a list", "A class"], strict=True):
        tokenizer, ids = encode(hf_folder, prompt)
        whole = tokenizer.decode(ids + greedy(hf_folder, ids, 8), skip_special_tokens=True)
        assert response["input_text"] + response["output_text"] == whole


def test_generation_ends_at_each_token_of_generation_config(hf_folder, run, tmp_path):
    folder = shutil.copytree(hf_folder, tmp_path / "model")
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    _, ids = encode(folder, "Return a list")
    new = greedy(folder, ids, 8)
    assert len(new) == 8
    for ends, length in (([1, new[4]], 1 + new.index(new[4])), (1, 8)):
        path.write_text(json.dumps(config | {"eos_token_id": ends}))
        metadata = json.loads(run("generate", folder, "--out", *SHORT)[0])["metadata"]
        assert metadata["generated_n_tokens"] == len(greedy(folder, ids, 8)) == length


def test_chat_renders_all_turns_with_the_folder_s_template(hf_folder, run):
    options = ("--chat", "--temperature=0", "--max_new_tokens=5")
    out, _ = run("generate", hf_folder, *options, stdin="Hello\nAnd now?\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf_folder)
    messages, expected = [], ""
    for question in ("Hello", "And now?"):
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        new = greedy(hf_folder, ids, 5, eos_token_id=[tokenizer.eos_token_id, 1999, end])
        start = tokenizer.decode(ids, skip_special_tokens=True)
        reply = tokenizer.decode(ids + new, skip_special_tokens=True)[len(start) :]
        messages.append({"role": "assistant", "content": reply})
        expected += reply + "\n"
    assert out == expected


def test_text_is_shown_once_its_characters_are_whole(hf_folder):
    tokenizer = HuggingFaceTokenizer(str(hf_folder))
    ids = tokenizer.encode("a naïve 日本", add_special_tokens=False)
    pieces = list(pieces_of(tokenizer, ids[:1], ids[1:]))
    assert "".join(pieces) == "a naïve 日本"
    assert len(pieces) > 3 and not any("\ufffd" in piece for piece in pieces)


def test_comparison_with_transformers_passes_and_fails_above_the_tolerance(
    hf_folder, run, tmp_path
):
    out, _ = run("compare", hf_folder, "--seq_len=24")
    assert "same likeliest token                    48 of 48 positions" in out
    changed = shutil.copytree(hf_folder, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0] += 1.0
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    options = (f"--checkpoint={changed}", "--tokens=3,1,4,1,5")
    out, _ = run("compare", hf_folder, *options, codes=["the models differ by more than 0.001"])
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    difference = model_of(changed)(tokens).logits - model_of(hf_folder)(tokens).logits
    assert f"largest difference of logits            {difference.abs().max():.2e}" in out


def test_imported_folder_is_a_checkpoint_of_the_same_model(hf_folder, run, tmp_path):
    run("import", hf_folder, tmp_path / "dcp")
    run("compare", hf_folder, f"--checkpoint={tmp_path / 'dcp'}", "--seq_len=8")
    _, err = run("generate", tmp_path / "dcp", codes=[1])
    assert "give the job's TOML file with --config" in err


def train_lora(hf_folder, folder, dtype="float32"):
    """Write a run of two LoRA steps, and the PEFT folder of its engine."""
    flags = f"""
        --job.dump_folder={folder} --model.name=qwen3 --model.hf_config={hf_folder}
        --model.hf_assets_path={hf_folder} --model.converters=lora --lora.rank=4
        --training.dataset=python_docs --training.seq_len=32 --training.local_batch_size=2
        --training.steps=2 --training.mixed_precision_param={dtype} --optimizer.lr=0.1
        --lr_scheduler.warmup_steps=0 --activation_checkpoint.mode=none --checkpoint.interval=2
        --checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.no_last_save_model_only
    """
    config = ConfigManager().parse_args(flags.split())
    with events.recording(config), Trainer(config) as trainer:
        trainer.train()
        trainer.save_peft(folder / "peft")


@pytest.fixture(scope="module")
def lora_run(hf_folder, tmp_path_factory):
    train_lora(hf_folder, folder := tmp_path_factory.mktemp("lora"))
    return folder


def test_text_of_adapters_on_a_bf16_base_is_that_of_the_merged_model(hf_folder, run, tmp_path):
    train_lora(hf_folder, tmp_path / "run", "bfloat16")
    run("export", tmp_path / "run", tmp_path / "merged", "--dtype=float32")
    texts = [run("generate", tmp_path / name, *SHORT)[0] for name in ("run", "merged")]
    first, second = (text[text.index("Return a list") :] for text in texts)  # without log lines
    assert first == second and len(first) > 16


def test_exported_adapters_are_those_of_the_engine(lora_run, run, tmp_path):
    out, _ = run("export", lora_run, tmp_path / "peft", "--peft")
    assert f"layers to {tmp_path}/peft\n" in out and "unfinished" not in out
    folders = (tmp_path / "peft", lora_run / "peft")
    written, expected = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)
    assert any(tensor.any() for key, tensor in written.items() if "lora_B" in key)
    one, other = (json.loads((folder / "adapter_config.json").read_text()) for folder in folders)
    assert one == other


def test_merged_export_computes_what_peft_computes(hf_folder, lora_run, run, tmp_path):
    peft = pytest.importorskip("peft")
    run("export", lora_run / "checkpoint/step-2", tmp_path / "merged")
    base = model_of(hf_folder)
    tokens = torch.randint(0, 2050, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = base(tokens).logits
        expected = peft.PeftModel.from_pretrained(base, str(lora_run / "peft"))(tokens).logits
        merged = model_of(tmp_path / "merged")(tokens).logits
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)  # logits of about 10


def test_export_has_the_tokens_and_the_template_that_the_job_chose(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(CHATML)
    flags = ["--training.steps=1", "--training.seq_len=16", "--checkpoint.enable"]
    flags += ["--training.eos_token=<|begin_of_text|>", "--training.chat_template=chat.jinja"]
    config = ConfigManager().parse_args(["--training.dataset=python_docs", *flags])
    with events.recording(config), Trainer(config) as trainer:
        trainer.train()
    run("export", "outputs", "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    assert tokenizer.eos_token == "<|begin_of_text|>" and tokenizer.chat_template == CHATML


def test_model_of_a_conversion_is_the_input_s_or_that_of_0_2(hf_folder, tmp_path):
    nothing = dict.fromkeys("config model_name model_flavor hf_config hf_assets_path".split())
    chosen = with_model({"input_dir": str(hf_folder), **nothing})
    assert chosen["spec"].model_args[chosen["model_flavor"]].dim == 32
    assert chosen["hf_assets_path"] == str(hf_folder)
    for named in ({}, {"model_name": "llama3"}, {"model_flavor": "8B"}):
        chosen = with_model({"input_dir": "nowhere", **nothing, **named})
        assert (chosen["model_name"], chosen["model_flavor"]) == ("llama3", "8B")
        assert chosen["hf_assets_path"] == "./assets/hf/Llama-3.1-8B"
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ValueError, match="No model here matches the Hugging Face config"):
        with_model({"input_dir": str(tmp_path), **nothing})


@pytest.mark.parametrize("source", ["job.toml", "run", None])
def test_weights_of_a_job_are_in_its_checkpoint_folder(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = '[job]\ndump_folder = "run"\n[checkpoint]\nfolder = "kept"\n'
    (tmp_path / "job.toml").write_text(table)
    folder = source and "run" or "outputs"
    for name, time in (("model", 1), ("kept/step-3", 2)):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / "model.safetensors").touch()
        os.utime(tmp_path / folder / name, (time, time))
    config = job_of("job.toml", None, [])
    assert os.path.relpath(weights_in(source, config)) == f"{folder}/kept/step-3"
    os.utime(tmp_path / folder / "model", (3, 3))  # exported later
    assert os.path.relpath(weights_in(source, config)) == f"{folder}/model"
    config.model.converters = ["lora"]  # the exported model has no adapters
    assert os.path.relpath(weights_in(source, config)) == f"{folder}/kept/step-3"


def test_peft_folder_of_a_run_is_the_run_s_model(lora_run, run):
    peft = shutil.copytree(lora_run / "peft", lora_run / "checkpoint/peft-step-2")
    texts = []
    for source in (lora_run / "checkpoint/step-2", peft):
        out, err = run("generate", source, *SHORT)
        assert f"weights: {source}" in err
        texts.append(out)
    first, second = (text[text.index("Return a list") :] for text in texts)  # without log lines
    assert first == second and len(first) > 16
    _, err = run("generate", peft, "--checkpoint.no_initial_load_in_hf", codes=[1])
    assert "their base was initialized at random" in err


def test_comparison_of_0_2_names_model_and_flavor(hf_folder, monkeypatch, capsys):
    script = "scripts/checkpoint_conversion/numerical_tests_example.py"
    for name, code, said in (
        ("qwen3", None, "of 8 positions"),
        ("llama3", 2, "describes a qwen3 model"),
    ):
        options = ["--model_name", name, "--model_flavor=0.6B", "--tokens=3,1,4,1,5,9,2,6"]
        monkeypatch.setattr(sys, "argv", [script, str(hf_folder), *options])
        try:
            found = runpy.run_path(script, run_name="__main__") and None
        except SystemExit as stopped:
            found = stopped.code
        assert found == code and said in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("train --nproc 1 job.toml --a.b 3", "train --job.config_file=job.toml --a.b 3"),
        ("show", "show --job.config_file=DEFAULT"),
        ("show --show.rows 1", "show --job.config_file=DEFAULT --show.rows 1"),
        ("train --a.b 3", "train --a.b 3"),
    ],
)
def test_toml_file_of_a_command_is_its_first_argument_beside_nproc(given, called, run, monkeypatch):
    seen = []
    for module in ("torchtitan.commands.train", "torchtitan.data.show"):
        monkeypatch.setattr(f"{module}.main", lambda: seen.append(" ".join(sys.argv)))
    run(*given.split())
    assert seen == [f"torchtitan {called.replace('DEFAULT', str(commands.DEFAULT_JOB))}"]


def test_mistakes_are_one_sentence(hf_folder, lora_run, run, tmp_path, monkeypatch):
    for name in ("NGPU", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    lora, hf, out = lora_run, hf_folder, tmp_path / "x"
    prompt = "--prompt=Return a"
    for arguments, message in (
        (("export", lora, hf), "holds files already"),
        (("export", hf, out, "--peft"), "has none; give a step folder of a LoRA run"),
        (("show", "nowhere.toml"), "names a TOML file that has to exist, got 'nowhere.toml'"),
        (("trian",), "no command 'trian', did you mean 'train'?"),
        (("generate", "--training.seq_len", "3", "nowhere"), "'nowhere' does not exist; correct"),
        (("export", lora, out, "--peft", "--dtype=float16"), "leave out one of them"),
        (("export", lora, out, "--base_model=b"), "add --peft"),
        (("estimate", hf), "give --gpus"),
        (("generate", hf, prompt, "--max_new_tokens=0"), "at least 1, got 0"),
        (("generate", hf, prompt, "--top_k=0"), "top_k must be at least 1"),
        (("compare", lora, "--training.mixed_precision_param=bfloat16"), "compare that folder"),
        (("compare", hf, "--model.flavour=8B"), "model.flavour=8B is unknown"),
    ):
        stdout, err = run(*arguments, codes=(1, 2))
        assert message in err and "Return a" not in stdout
    assert not out.exists()


@pytest.fixture
def store(hf_folder, tmp_path, monkeypatch, run):
    """Objects: hf (a model), dcp (its checkpoint), job.toml, text, tokens. Returns a folder on the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("ro", ReadOnly, clobber=True)
    fs = fsspec.filesystem("memory")
    for file in hf_folder.iterdir():
        fs.put_file(str(file), f"/b/hf/{file.name}")
    fs.pipe_file("/b/text/a.txt", b"One text. " * 100)
    fs.pipe_file("/b/prompts", b"One")
    config = f'[model]\nname = "qwen3"\nhf_config = "{hf_folder}"\nhf_assets_path = "{hf_folder}"\n'
    config += '[training]\ndataset = "local"\ndataset_path = "memory://b/text"\nseq_len = 32\n'
    fs.pipe_file("/b/job.toml", config.encode())
    yield tmp_path
    fs.store.clear()
    assert not [*tmp_path.glob("*:*")]  # an address was never taken for a path


TOKENIZE = ("tokenize", "memory://b/text", "tokens", f"--tokenizer={TOKENIZER}", "--processes=1")


@pytest.mark.parametrize(
    "commands",
    {
        "import, export, compare, generate": [
            ("import", "memory://b/hf", "memory://b/dcp", "--config=memory://b/job.toml"),
            ("compare", "memory://b/dcp", "--config=memory://b/job.toml", "--with=memory://b/hf",
             "--seq_len=4"),
            ("compare", "memory://b/hf", "--checkpoint=memory://b/dcp", "--seq_len=4"),
            ("export", "memory://b/dcp", "memory://b/out", "--config=memory://b/job.toml"),
            ("generate", "memory://b/out", "--prompts=memory://b/prompts", "--max_new_tokens=1"),
        ],
        "tokenize, show": [
            TOKENIZE,
            ("tokenize", "--check", "file://{here}/tokens"),
            ("show", "memory://b/job.toml", "--show.rows=1"),
            ("show", "memory://b/job.toml", "--show.rows=1", "--training.dataset=tokens",
             f"--model.hf_assets_path={TOKENIZER}", "--training.dataset_path=file://{here}/tokens"),
        ],
    }.values(),
)  # fmt: skip
def test_command_takes_addresses_of(store, run, commands):
    for command in commands:
        run(*(argument.format(here=store) for argument in command))


def test_plan_and_estimate_read_an_address_without_its_weights(store):
    config = job_of("memory://b/hf", None, [])
    assert config.model.name == "qwen3"
    copied = os.listdir(config.model.hf_assets_path)
    assert "tokenizer.json" in copied and "model.safetensors" not in copied
    assert weights_in("memory://b/hf", config) == "memory://b/hf"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("export", "memory://b/hf", "ro://b/x"), "only reads.*ro://b/x"),
        (("import", "memory://b/hf", "ro://b/x"), "only reads.*ro://b/x"),
        (("export", "memory://b/hf", "memory://b/hf", "--overwrite"), "one is inside the other"),
        (("export", "memory://b/hf", "memory://b/text"), "memory://b/text holds files already"),
        (("generate", "memory://b/none"), "the model of 'memory://b/none' is unknown"),
        (("generate", "zzz://b/none"), "zzz://b/none.* is not an address that fsspec knows"),
        (("compare", "memory://b/hf", "--with=memory://b/none", "--seq_len=4"), "--with must be .* got 'memory://b/none'"),
        (("tokenize", *TOKENIZE[1:2], "memory://b/x", *TOKENIZE[3:]), "OUT must be on a disk"),
        ((*TOKENIZE[:3], "--tokenizer=memory://b/hf"), "--tokenizer must be on a disk"),
        (("show", "memory://b/none.toml"), "job.config_file names .* got 'memory://b/none.toml'"),
        (("show", "--job.dump_folder=memory://b/x"), "job.dump_folder must be on a disk"),
        (("report", "memory://b/run"), "RUN_FOLDER must be on a disk"),
        (("report", "x", "--output=memory://b/page.html"), "--output must be on a disk"),
    ],
)  # fmt: skip
def test_address_that_a_command_cannot_use_is_refused_by_name(store, run, command, message):
    _, err = run(*command, codes=(1, 2))
    assert "Traceback" not in err and re.search(message, err), err
