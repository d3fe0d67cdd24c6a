import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from train import config
from train.arguments import check, read
from train.config import Config, changed, check_batch, describe, find, flatten, load, shipped_names
from train.status import TrainingRefused

LISTS = "(python -m train --help lists the keys)"


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_the_shipped_configs_load() -> None:
    expected = ["cifar10-resnet18", "digits", "digits-short", "imagenet-resnet50", "synthetic-resnet50"]
    assert shipped_names() == expected
    for name in expected:
        overrides = ["data.path=/data"] if name.startswith(("cifar10", "imagenet")) else []
        loaded = load(find(name), overrides)
        for key, value in flatten(loaded).items():
            assert type(value) is type(flatten(Config())[key]), f"{name}: {key}"


def test_the_short_config_differs_from_digits_only_in_how_long_it_trains_and_what_it_writes() -> None:
    differences = changed(flatten(load(find("digits"))), load(find("digits-short")))
    assert set(differences) == {"epochs", "steps", "evaluate.every", "evaluate.split", "checkpoint.every"}


def test_an_override_replaces_the_files_value_and_that_replaces_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 5\noptimizer: {lr: 0.5, momentum: 0.8}\n")
    loaded = load(path, ["optimizer.lr=1e-3", "data.augment=false", "data.path=a=b", "optimizer.lr=2e-3"])
    assert (loaded.seed, loaded.optimizer.lr, loaded.optimizer.momentum) == (5, 0.002, 0.8)
    assert (loaded.data.augment, loaded.data.path, loaded.batch_size) == (False, "a=b", 64)


def test_yaml_text_that_is_a_number_is_taken_where_a_float_belongs(tmp_path: Path) -> None:
    assert yaml.safe_load("1e-3") == "1e-3"
    assert load(written(tmp_path, "optimizer: {lr: 1e-3}")).optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sead: 1", f"FILE: unknown key 'sead': did you mean seed? {LISTS}"),
        ("model: {nam: x}", f"FILE: unknown key 'model.nam': did you mean model.name? {LISTS}"),
        ("zzz: 1", f"FILE: unknown key 'zzz' {LISTS}"),
        ("model: resnet18", "FILE: model is 'resnet18': give a mapping of keys"),
        ("- 1", "FILE: the file is [1]: give a mapping of keys"),
        ("seed: one", "FILE: seed is 'one' (str): give a value of type int"),
        ("seed: true", "FILE: seed is True (bool): give a value of type int"),
        ("seed: 1.0", "FILE: seed is 1.0 (float): give a value of type int"),
        ("compile: 1", "FILE: compile is 1 (int): give a value of type bool"),
        ("run_dir: 7", "FILE: run_dir is 7 (int): give a value of type str"),
        ("optimizer: {lr: .nan}", "FILE: optimizer.lr is nan (float): give a value of type float"),
        ("optimizer: {lr: true}", "FILE: optimizer.lr is True (bool): give a value of type float"),
        ("precision: fp8", "FILE: precision is 'fp8': give one of fp32, bf16, fp16"),
        ("precision: [fp32]", "FILE: precision is ['fp32']: give one of fp32, bf16, fp16"),
        ("epochs: 0", "epochs is 0: give at least 1"),
        ("optimizer: {lr: -1}", "optimizer.lr is -1.0: give at least 0"),
        ("label_smoothing: 1", "label_smoothing is 1.0: give less than 1"),
        (f"seed: {2**63}", f"seed is {2**63}: give at most 2**63-1"),
        (f"steps: {2**63}", f"steps is {2**63}: give at most 2**63-1"),
        (
            "optimizer: {nesterov: true, momentum: 0}",
            "optimizer.nesterov is true with optimizer.momentum 0: give a momentum",
        ),
        (
            "data: {name: cifar10}",
            "data.path is empty for cifar10: give data.path=DIR, the folder that holds it",
        ),
        (
            "data: {name: synthetic, folds: 3}",
            "data.folds is 3 for synthetic: only digits and cifar10 have them",
        ),
        (
            "data: {folds: 3, fold: 3}",
            "data.fold is 3 of data.folds 3: give at least 2 folds, and a fold from 0 to folds - 1",
        ),
        (
            "data: {folds: 1}",
            "data.fold is 0 of data.folds 1: give at least 2 folds, and a fold from 0 to folds - 1",
        ),
        (
            "data: {fold: 1}",
            "data.fold is 1 of data.folds 0: give at least 2 folds, and a fold from 0 to folds - 1",
        ),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TrainingRefused) as refusal:
        load(path)
    assert str(refusal.value) == message.replace("FILE", str(path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is no override: write key=value"),
        ("step=2", f"override: unknown key 'step': did you mean steps? {LISTS}"),
        ("learning_rate=0.1", f"override: unknown key 'learning_rate': did you mean optimizer.lr? {LISTS}"),
        ("lr=0.1", f"override: unknown key 'lr': did you mean optimizer.lr? {LISTS}"),
        (
            "optimizer=1",
            f"override: unknown key 'optimizer': did you mean optimizer.name or optimizer.lr or optimizer.warmup_steps? {LISTS}",
        ),
        ("steps.x=1", f"override: unknown key 'steps.x': did you mean steps? {LISTS}"),
        ("steps=4.0", "override: steps is '4.0' (str): give a value of type int"),
        ("steps=1__0", "override: steps is '1__0' (str): give a value of type int"),
        (
            f"seed={'1' * 5000}",
            f"override: seed is '{'1' * 59}... (str): give a value of type int",
        ),
        ("steps=", "override: steps is '' (str): give a value of type int"),
        ("compile=yes", "override: compile is 'yes' (str): give a value of type bool"),
        ("optimizer.lr=fast", "override: optimizer.lr is 'fast' (str): give a value of type float"),
        (
            "data.name=mnist",
            "override: data.name is 'mnist': give one of digits, cifar10, imagefolder, synthetic",
        ),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str) -> None:
    with pytest.raises(TrainingRefused) as refusal:
        load(find("digits"), [override])
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("least", "keys"),
    [
        (0, "seed steps label_smoothing data.image_size data.strength data.folds data.fold data.workers"),
        (
            0,
            "optimizer.lr optimizer.warmup_steps optimizer.momentum optimizer.weight_decay optimizer.clip_norm",
        ),
        (0, "evaluate.every checkpoint.every checkpoint.minutes checkpoint.keep"),
        (1, "epochs batch_size accumulation data.samples evaluate.batch_size"),
        (2, "data.classes"),
    ],
)
def test_each_number_has_a_least_value(tmp_path: Path, least: int, keys: str) -> None:
    path = written(tmp_path, "")
    for key in keys.split():
        assert flatten(load(path, [f"{key}={least}"]))[key] == least
        with pytest.raises(TrainingRefused) as refused:
            load(path, [f"{key}={least - 1}"])
        assert str(refused.value).replace(".0:", ":") == f"{key} is {least - 1}: give at least {least}"


def test_yaml_that_names_a_python_object_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path = written(tmp_path, f"seed: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']")
    with pytest.raises(TrainingRefused, match=r"line 1: the tag .*python/object/apply:os.mkdir is not taken"):
        load(path)
    assert not (tmp_path / "made").exists()


def test_a_name_that_is_neither_shipped_nor_a_file_is_refused() -> None:
    with pytest.raises(TrainingRefused) as refusal:
        find("digit")
    assert str(refusal.value) == (
        "--config digit: no such file or shipped config: did you mean digits? give a path or one of "
        "cifar10-resnet18, digits, digits-short, imagenet-resnet50, synthetic-resnet50"
    )


def test_a_batch_that_does_not_fall_into_equal_parts_is_refused_with_the_numbers() -> None:
    check_batch(Config(batch_size=12, accumulation=2), 3)
    with pytest.raises(TrainingRefused) as refusal:
        check_batch(Config(batch_size=66, accumulation=4), 3)
    assert str(refusal.value) == (
        "batch_size is 66, no multiple of 3 ranks x accumulation 4 = 12: give a multiple of 12"
    )


@pytest.mark.parametrize(
    ("ranks", "size"), [(1, 128), (2, 128), (3, 129), (5, 130), (6, 132), (7, 133), (12, 132), (200, 200)]
)
def test_a_shipped_config_runs_on_whatever_was_granted_and_says_what_it_changed(
    ranks: int, size: int
) -> None:
    asked = read(["--config", "digits"], ranks)
    check_batch(asked.config, ranks)
    assert asked.config.batch_size == size
    said = f"digits: batch_size {size} instead of 128, {size // ranks} for each of the {ranks} ranks (batch_size=N chooses)"
    assert asked.note == ("" if size == 128 else said)


def test_a_batch_that_somebody_chose_is_kept_or_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="batch_size is 128, no multiple of 3 ranks"):
        read(["--config", "digits", "batch_size=128"], 3)
    with pytest.raises(TrainingRefused, match="batch_size is 64, no multiple of 3 ranks"):
        read(["--config", str(written(tmp_path, "batch_size: 64"))], 3)
    assert read(["--config", "digits", "batch_size=66"], 3).config.batch_size == 66
    assert read(["--config", "digits", "batch_size=66"], 3).is_batch_given
    assert read(["--config", str(written(tmp_path, "batch_size: 66"))], 3).is_batch_given
    fitted = read(["--config", "digits", "accumulation=3"], 2)  # nobody has chosen that
    assert (fitted.is_batch_given, fitted.config.batch_size) == (False, 132)
    assert not read(["--config", "digits"], 3).is_batch_given


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--config", "digits", "seed=2"], ""),
        (["--config", "digits", "seed=x"], "override: seed is 'x' (str): give a value of type int"),
        (["--config", "digits", "batch_size=7"], "batch_size is 7, no multiple of 2 ranks"),
        (["--config", "mine.yaml", "--resume", "never", "batch_size=8"], ""),
        (["--config", "mine.yaml"], "batch_size is 7, no multiple of 2 ranks"),
        (["--config", "mine.yaml", "batch_size=x"], "override: batch_size is 'x' (str)"),
        (["--config", "digit"], "--config digit: no such file or shipped config: did you mean digits?"),
        (["--config", "on/the/node.yaml", "seed=x"], ""),  # it may be there on the nodes
        (["seed=2"], "the following arguments are required: --config"),
    ],
)
def test_a_command_line_is_checked_before_the_job_as_far_as_its_config_is_here(
    tmp_path: Path, arguments: list[str], why: str
) -> None:
    written(tmp_path, "batch_size: 7")
    if not why:
        check(arguments, 2, tmp_path)
        return
    with pytest.raises(TrainingRefused) as refused:
        check(arguments, 2, tmp_path)
    assert str(refused.value).startswith(why)


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), ("", "''"), ("a b", "a b"), (3, "3"), (0.1, "0.1"), (0, "0")],
)
def test_a_value_is_shown_as_an_override_would_give_it(value: object, text: str) -> None:
    assert config.as_text(value) == text


def test_every_key_is_described_for_the_help() -> None:
    described = {key: (default, doc) for key, _, default, doc in describe()}
    assert {key: default for key, (default, _) in described.items()} == flatten(Config())
    assert all(doc.endswith(".") for _, doc in described.values())


def test_every_key_has_one_rule_for_a_resumed_run() -> None:
    assert set(flatten(Config())) >= config.FREE_ON_RESUME
    assert set(flatten(Config())) >= config.SAID_ON_RESUME
    assert not config.FREE_ON_RESUME & config.SAID_ON_RESUME


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program where importing torch fails."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['train', *sys.argv[1:]];"
        "runpy.run_module('train', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_needs_no_torch_and_lists_keys_and_configs() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "shipped configs: cifar10-resnet18, digits, digits-short" in done.stdout
    assert "  optimizer.lr=0.1  (float)\n      Learning rate at the end of the warm-up;" in done.stdout


RANK_1_OF_2 = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --config: see python -m train --help"),
        (
            ["--config", "digits", "--resum", "x"],
            "unrecognized arguments: --resum (did you mean --resume?): see python -m train --help",
        ),
        (["--config", "digits", "steps=1__0"], "override: steps is '1__0' (str): give a value of type int"),
        (
            ["--config", "digits", "batch_size=7"],
            "batch_size is 7, no multiple of 2 ranks x accumulation 1 = 2: give a multiple of 2",
        ),
    ],
)
def test_a_mistake_ends_with_64_and_one_line_of_rank_0_before_torch_is_imported(
    arguments: list[str], message: str
) -> None:
    first = command(*arguments, **RANK_1_OF_2 | {"RANK": "0", "LOCAL_RANK": "0"})
    assert (first.returncode, first.stdout, first.stderr) == (64, "", f"train: {message}\n")
    other = command(*arguments, **RANK_1_OF_2)
    assert (other.returncode, other.stdout, other.stderr) == (64, "", "")


def test_options_may_stand_between_overrides() -> None:
    done = command("steps=4", "--config", "digits", "--resume", "never", "seed=x")
    assert (done.returncode, done.stderr) == (
        64,
        "train: override: seed is 'x' (str): give a value of type int\n",
    )
