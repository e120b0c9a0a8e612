"""The sources of a config: defaults, under a TOML file, under command line flags."""

import dataclasses
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import tomli
import tomli_w
import torch
from tyro.extras import get_parser

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.checks import ConfigError, check_job_config
from torchtitan.config.checks.common import is_path, value_of
from torchtitan.config.fields import settings_of
from torchtitan.config.job_config import Parallelism, Validation
from torchtitan.config.manager import exit_on_config_error
from torchtitan.job import resolve_job
from torchtitan.rl.job_config import JobConfig as RLJobConfig

TRAIN_CONFIGS = Path("torchtitan/models/llama3/train_configs")
DEBUG_TOML = str(TRAIN_CONFIGS / "debug_model.toml")
CUSTOM_MODULE = "tests.assets.extended_job_config_example"


def parse(*args: str) -> JobConfig:
    return ConfigManager().parse_args(list(args))


@pytest.fixture
def parse_toml(tmp_path):
    """Parse a file of this TOML text or dict, and flags."""

    def parse_with(content: str | dict, *args: str) -> JobConfig:
        # Without a suffix, which the loader must ignore.
        path = tmp_path / "job"
        path.write_text(content if isinstance(content, str) else tomli_w.dumps(content))
        return parse("--job.config_file", str(path), *args)

    return parse_with


# --- Sources and their precedence -------------------------------------------------------------


def test_defaults_are_those_a_client_that_names_few_keys_relies_on():
    config = parse()
    assert config == JobConfig()
    defaults = """
        training.steps=10000 training.seq_len=2048 training.local_batch_size=8 training.max_norm=1.0
        training.mixed_precision_param='bfloat16' model.converters=[] model.attn_type=None
        model.attn_mask_type=None optimizer.name='AdamW' optimizer.implementation='fused'
        checkpoint.interval=500 checkpoint.keep_latest_k=10 checkpoint.folder='checkpoint'
        parallelism.data_parallel_shard_degree=-1 activation_checkpoint.mode='selective'
        activation_checkpoint.selective_ac_option='2' job.dump_folder='./outputs'
        lr_scheduler.step_offset=0
    """
    for key, _, value in (text.partition("=") for text in defaults.split()):
        assert repr(value_of(config, key)) == value


def test_the_last_config_file_is_read_in_either_form_of_the_flag(tmp_path):
    """As in `scripts/run_train.sh --job.config_file mine.toml`: the script's own file comes first."""
    assert parse("--job.config_file", DEBUG_TOML).training.steps == 10
    path = tmp_path / "mine.toml"
    path.write_text("[training]\nsteps = 3")
    config = parse("--job.config_file", DEBUG_TOML, f"--job.config-file={path}")
    assert (config.training.steps, config.job.config_file) == (3, str(path))
    assert config.metrics.log_freq == 10  # the first one is not read


def test_flags_win_over_toml_and_toml_over_defaults(parse_toml):
    config = parse_toml({"training": {"steps": 3, "seq_len": 16}}, "--training.steps=4").training
    assert (config.steps, config.seq_len, config.local_batch_size) == (4, 16, 8)


def test_each_parse_starts_afresh():
    manager = ConfigManager()
    config = manager.parse_args(["--training.steps=5", "--model.converters=a"])
    assert (config.training.steps, config.model.converters) == (5, ["a"])
    assert manager.parse_args([]) == JobConfig()


def test_config_read_from_toml_is_the_config_written_to_it(parse_toml):
    def without_none(table: dict) -> dict:
        values = {k: without_none(v) if isinstance(v, dict) else v for k, v in table.items()}
        return {k: v for k, v in values.items() if v is not None}

    defaults = JobConfig().to_dict()
    assert parse_toml(without_none(defaults)).to_dict() | {"job": None} == defaults | {"job": None}


# --- Flags ------------------------------------------------------------------------------------


def test_list_flag_is_one_argument_with_commas_and_a_list_of_lists_one_argument_per_list(
    parse_toml,
):
    assert parse("--model.converters=").model.converters == [""]
    toml = {"checkpoint": {"exclude_from_loading": ["optimizer", "dataloader"]}}
    assert parse_toml(toml).checkpoint.exclude_from_loading == ["optimizer", "dataloader"]
    config = parse_toml(toml, "--checkpoint.exclude_from_loading", "lr_scheduler,optimizer")
    assert config.checkpoint.exclude_from_loading == ["lr_scheduler", "optimizer"]
    assert parse("--quantize.grouped_mm.mx.fqns=a,b").quantize.grouped_mm.mx.fqns == ["a", "b"]
    config = parse("--parallelism.module_fqns_per_model_part", "a,b", "c")
    assert config.parallelism.module_fqns_per_model_part == [["a", "b"], ["c"]]


def test_switches_come_in_pairs_and_take_no_value(capsys):
    flag = "profiling.enable_memory_snapshot"
    assert parse(f"--{flag}").profiling.enable_memory_snapshot
    assert not parse("--profiling.no-enable-memory-snapshot").profiling.enable_memory_snapshot
    assert not parse("--profiling.no_enable_memory_snapshot").profiling.enable_memory_snapshot
    with pytest.raises(SystemExit, match="2"):
        parse(f"--{flag}=False")


def test_dashes_none_and_nested_sections_work_as_flags():
    flags = """
        --lr-scheduler.warmup-steps=3 --training.dataloader.num_workers=2 --debug.seed=None
        --training.max_norm=2 --model.attn_type=flex
    """
    config = parse(*flags.split())
    assert config.lr_scheduler.warmup_steps == 3 and config.training.dataloader.num_workers == 2
    assert config.debug.seed is None and config.training.max_norm == 2
    assert config.model.attn_type == "flex"


def test_rank_is_compared_with_a_number_of_ranks_that_the_launcher_names(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    resolve_job(JobConfig())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    resolve_job(JobConfig())
    monkeypatch.setenv("RANK", "-1")
    with pytest.raises(ConfigError, match="RANK must be an integer from 0 up, got '-1'"):
        resolve_job(JobConfig())


def test_degree_that_divides_no_heads_is_named_before_the_number_of_processes():
    config = JobConfig()
    config.model.flavor, config.parallelism.tensor_parallel_degree = "8B", 3
    config.parallelism.data_parallel_shard_degree = 10
    with pytest.raises(ConfigError, match="must divide n_heads .* got 3 with 32; .* 1, 2, 4, 8$"):
        resolve_job(config, builds_data=False)


def test_help_lists_every_key(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--help"])  # which is read when it is called
    with pytest.raises(SystemExit, match="0"):
        ConfigManager().parse_args()
    printed = capsys.readouterr().out.replace("_", "-")
    for section in dataclasses.fields(JobConfig):
        for key in dataclasses.fields(section.type):
            flag = f"--{section.name}.{key.name}"
            in_files_only = flag in ("--training.mixture", "--optimizer.groups")
            assert (flag.replace("_", "-") in printed) is not in_files_only


@pytest.mark.filterwarnings("ignore:get_parser")
def test_manager_itself_has_a_parser(capsys):
    get_parser(ConfigManager).print_help()
    assert "usage" in capsys.readouterr().out


# --- Mistakes in the file ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"[job]\n\n[training", tomli.TOMLDecodeError, "job, line 3: not valid"),
        (b'[job]\nd = "', tomli.TOMLDecodeError, "job, line 2: not valid"),
        (b"[training]\nsteps = \xff\n", tomllib.TOMLDecodeError, "job, line 2.*UTF-8"),
        (b"a = " + b"[" * 10_000, ConfigError, "job cannot be read: it is nested too deeply"),
        (b"[optimizer]\nlr = 1" + b"0" * 400, ConfigError,
         r"\[optimizer\] lr = 1000.*: the number is too large"),
        (b"[training]\nsteps = 1" + b"0" * 5000, ConfigError, "job cannot be read: Exceeds the limit"),
    ],
)  # fmt: skip
def test_toml_that_cannot_be_read_names_file_and_line(tmp_path, content, error, message):
    (tmp_path / "job").write_bytes(content)
    with pytest.raises(error, match=message):
        parse("--job.config_file", str(tmp_path / "job"))


def test_config_file_that_is_no_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"job\.config_file.*/nowhere/x\.toml"):
        parse("--job.config_file=/nowhere/x.toml")
    with pytest.raises(ConfigError, match="job.config_file.*readable.*Is a directory"):
        parse("--job.config_file", str(tmp_path))
    os.mkfifo(tmp_path / "job")
    with pytest.raises(ConfigError, match=r"job.config_file .*/job'.*not a regular file"):
        parse("--job.config_file", str(tmp_path / "job"))


PATHS = """
job.config_file job.dump_folder job.save_config_file profiling.save_traces_folder
profiling.save_memory_snapshot_folder metrics.save_tb_folder metrics.save_jsonl_file
model.hf_assets_path model.hf_config model.tokenizer_path training.dataset_path validation.dataset_path
parallelism.pipeline_parallel_schedule_csv checkpoint.folder checkpoint.initial_load_path
comm.save_traces_folder rl.task.path rl.task.eval_path rl.task.chat_template
rl.critic.initial_load_path rl.serve.api_key_file lora.adapter_path training.chat_template
loss.teacher loss.reference rl.teacher.folder
""".split()


def test_home_folder_takes_the_place_of_a_tilde_in_every_path(tmp_path, monkeypatch):
    assert {key for key, *_ in settings_of(RLJobConfig()) if is_path(key)} == set(PATHS)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()
    config = ConfigManager(RLJobConfig).parse_args([f"--{key}=~/x" for key in PATHS])
    assert {value_of(config, key) for key in PATHS} == {f"{tmp_path}/x"}
    (tmp_path / "x").write_text("job.dump_folder = '~/y'\njob.description = '~/y'\n")
    config = parse("--job.config_file=~/x")
    assert config.job.dump_folder == f"{tmp_path}/y" and config.job.description == "~/y"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("checkpoint.interval=0", "checkpoint.interval must be at least 1, got 0"),
        ("optimizer.lr=1" + "0" * 400, "optimizer.lr must be at most 1e.38, got inf"),
        ("checkpoint.interval=x", "Error parsing --checkpoint.interval: .*'x' \\(`"),
        ("checkpoint.enable=True", "True is unknown; a switch takes no value"),
        ("checkpoint.interval", "Missing value for argument '--checkpoint.interval'"),
        ("checkpoint.intervals=3", r"--checkpoint.intervals=3 is unknown, did you mean --checkp.*\?"),
        ("metrics.enable_tensorbord", ".* is unknown, did you mean --metrics.enable_tensorboard or"),
        ("metrics.no_enable_jsnl", ".* is unknown, did you mean .*--metrics.no_enable_jsonl"),
    ],
)  # fmt: skip
def test_mistake_in_a_flag_is_one_line(flag, words, capsys):
    with pytest.raises(SystemExit, match="2"), exit_on_config_error():
        check_job_config(parse("--checkpoint.enable", f"--{flag}"))
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"config error: {words}", line)


def test_mistake_in_toml_is_one_line(tmp_path, capsys):
    path = tmp_path / "job.toml"
    for text, words in (
        ("[training]\nstepz = 3", "'stepz' in [training] is unknown, did you mean 'steps'?"),
        ("[trainign]\nsteps = 3", "'trainign' in the file is unknown, did you mean 'training'?"),
        ("[compile]\nxyz = 3", "'xyz' in [compile] is unknown; known are enable, comp"),
        ("model = 3", "model is a table of settings, got the single value 3; write [model] on a"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match="2"), exit_on_config_error():
            parse(f"--job.config_file={path}")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"config error: {words}")
        assert line.endswith("--help` lists all keys)") and f"(in {path}; `" in line
        if "stepz" in text:  # the lines that programs for 0.2.x look for
            with pytest.raises(ValueError) as raised:
                parse(f"--job.config_file={path}")
            lines = str(raised.value).splitlines()
            assert lines[0].startswith("Invalid field names in <class 'torchtitan.config.job_conf")
            assert lines[2] == "Run `NGPU=1 ./run_train.sh --help` to read all valid fields."


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[training]\nsteps = true", ["[training] steps", "True", "int", "bool"]),
        ("[compile]\nenable = 1", ["[compile] enable", "bool", "int"]),
        ('[model]\nconverters = "x"', ["[model] converters", "list[str]", "str"]),
        ("[model]\nconverters = [1]", ["[model] converters", "str", "int"]),
        ('[model]\nattn_type = "flash"', ["[model] attn_type", '"sdpa", "flex", "varlen"']),
        ("[lr_scheduler]\ntotal_steps = 2.5", ["[lr_scheduler] total_steps", "int", "float"]),
        ("[training.dataloader]\nnum_workers = '2'", ["[training.dataloader] num_workers"]),
        ("[training]\ndataloader = 2", ["training.dataloader is a table", "2"]),
        ("[training.steps]\nx = 1", ["[training] steps", "int", "dict"]),
        ("[parallelism]\nmodule_fqns_per_model_part = ['a']", ["module_fqns", "list[list[str]]"]),
    ],
)
def test_value_of_another_type_is_named_with_the_expected_one(parse_toml, toml, words):
    with pytest.raises(ConfigError) as raised:
        parse_toml(toml)
    for word in words:
        assert word in str(raised.value)


def test_integer_serves_for_a_float(parse_toml):
    config = parse_toml("[optimizer]\nlr = 1\n[lr_scheduler]\ndecay_ratio = 1")
    assert repr((config.optimizer.lr, config.lr_scheduler.decay_ratio)) == "(1.0, 1.0)"


def test_values_that_0_2_refuses_when_it_makes_a_section_are_refused_everywhere(parse_toml):
    with pytest.raises(ValueError, match="context_parallel_load_balancer"):
        Parallelism(context_parallel_load_balancer="")
    with pytest.raises(ConfigError, match="context_parallel_load_balancer.*headtail"):
        parse_toml({"parallelism": {"context_parallel_load_balancer": ""}})
    with pytest.raises(SystemExit, match="2"):
        parse("--parallelism.context_parallel_load_balancer=")
    with pytest.raises(AssertionError, match="validation.steps"):
        Validation(steps=0)
    with pytest.raises(ConfigError, match="validation.steps must be positive, or -1.*got 0"):
        parse_toml({"validation": {"steps": 0}})
    with pytest.raises(ConfigError, match="validation.steps must be positive, or -1.*got -2"):
        parse("--validation.steps=-2")


# --- Custom config modules --------------------------------------------------------------------


@pytest.mark.parametrize("key", ["job.custom_config_module", "experimental.custom_args_module"])
def test_custom_module_named_by_flag_or_in_toml_extends_the_config(parse_toml, key):
    config = parse(f"--{key}={CUSTOM_MODULE}", "--custom_config.how-is-your-day", "bad")
    assert (config.custom_config.how_is_your_day, config.custom_config.num_days) == ("bad", 7)
    assert (config.training.steps, config.training.my_custom_steps) == (99, 32)
    assert config.training.seq_len == 2048
    assert isinstance(config, JobConfig) and isinstance(config.to_dict(), dict)
    check_job_config(config)
    section, name = key.split(".")
    own = {"how_is_your_day": "really good", "num_days": 3}
    toml = {section: {name: CUSTOM_MODULE}, "custom_config": own}
    config = parse_toml(toml, "--custom_config.num_days=5")
    assert config.training.my_custom_steps == 32
    assert vars(config.custom_config).items() >= (own | {"num_days": 5}).items()
    assert config.job.custom_config_module == CUSTOM_MODULE


def test_custom_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="job.custom_config_module.*'no.such.module'"):
        parse("--job.custom_config_module=no.such.module")
    with pytest.raises(ConfigError, match="job.custom_config_module.*'json', which has none"):
        parse("--job.custom_config_module=json")


def test_merged_config_takes_sections_without_default_and_refuses_such_keys():
    @dataclasses.dataclass
    class CustomCheckpoint:
        convert_path: str = "/custom/path"

    @dataclasses.dataclass
    class CustomJobConfig:
        checkpoint: CustomCheckpoint

    @dataclasses.dataclass
    class WithoutDefault:
        answer: int

    merged = ConfigManager._merge_configs(JobConfig, CustomJobConfig)
    assert issubclass(merged, JobConfig) and merged.__name__ == "MergedJobConfig"
    config = ConfigManager(config_cls=merged).parse_args(["--checkpoint.convert_path=/other"])
    assert (config.checkpoint.convert_path, config.checkpoint.interval) == ("/other", 500)
    assert config.model.name == "llama3"
    with pytest.raises(ConfigError, match="default value, got none for 'answer'"):
        ConfigManager._merge_configs(JobConfig, WithoutDefault)


def test_help_of_an_extended_section_keeps_its_texts(capsys):
    @dataclasses.dataclass
    class MoreTraining:
        more: int = 1

    @dataclasses.dataclass
    class MoreJobConfig:
        training: MoreTraining

    config_cls = ConfigManager._merge_configs(JobConfig, MoreJobConfig)
    with pytest.raises(SystemExit):
        ConfigManager(config_cls).parse_args(
            [f"--job.custom_config_module={CUSTOM_MODULE}", "--help"]
        )
    text = capsys.readouterr().out
    assert "--training.more" in text and "--training.my_custom_steps" in text
    assert "Tokens per sequence" in text and "Optimizer steps to train for" in text


# --- Old keys, logging, presets ---------------------------------------------------------------


def test_old_tokenizer_key_takes_the_place_of_the_new_one_and_an_old_file_is_refused(tmp_path):
    assert parse(f"--model.tokenizer_path={tmp_path}").model.hf_assets_path == str(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match="model.hf_assets_path.*hf download"):
        parse(f"--model.hf_assets_path={tmp_path}/tokenizer.model")


def test_rank_0_writes_the_config_it_was_given(tmp_path, monkeypatch):
    config = parse(f"--job.dump_folder={tmp_path}", "--job.save_config_file=x/config.json")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    config.maybe_log()
    assert not (tmp_path / "x").exists()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    config.maybe_log()
    assert json.loads((tmp_path / "x/config.json").read_text()) == config.to_dict()
