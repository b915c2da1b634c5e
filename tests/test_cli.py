import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_moe.cli import main
from lightning_moe.cli_checkpoints import newest_checkpoints
from lightning_moe.mesh import check_expert_parallel_size
from tests.harness import ROOT, in_subprocess


class Toy(BoringModel):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.SGD, size: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


class OtherToy(Toy):
    pass


class Broken(Toy):
    def __init__(self):
        raise ValueError("a fault of the user's class")


class BrokenInTraining(Toy):
    def training_step(self, batch, batch_idx):
        raise ValueError("a fault of the user's step")


class ToyData(BoringDataModule):
    def __init__(self, length: int = 8):
        super().__init__()
        self.length = length


class FailsAlone(Callback):
    """Rank 1 fails, by a mistake that the package finds or by a fault of its own."""

    def __init__(self, mistake: bool):
        self.mistake = mistake

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            if self.mistake:
                check_expert_parallel_size(7, 2)
            raise ValueError("a fault on one rank")


class RefusesAll(Callback):
    def on_train_start(self, trainer, pl_module):
        check_expert_parallel_size(7, 2)


class Slips(Callback):
    def on_train_start(self, trainer, pl_module):
        check_expert_parallel_size("7", None)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a config into an empty folder, go there, and return what changes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name="run.yaml", model="Toy", **trainer):
        content = {
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "max_steps": 3,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                **trainer,
            },
            "model": {"class_path": f"{__name__}.{model}", "init_args": {}},
            "data": {"class_path": f"{__name__}.ToyData"},
        }
        Path(name).write_text(yaml.safe_dump(content))
        return name

    return write


def _one_line(capsys):
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if not line.startswith(("Seed set", "GPU available"))]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def _steps(checkpoint):
    return torch.load(checkpoint, weights_only=False)["global_step"]


def test_without_a_command_the_help_lists_all(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in ("fit", "validate", "test", "predict", "doctor"))


def test_an_unknown_command_is_refused_with_a_proposal(capsys):
    assert main(["fitt"]) == 2
    text = capsys.readouterr().err
    assert "unknown command 'fitt'. Did you mean 'fit'?" in text
    assert "doctor" in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.match(r"lightning-moe \d+\.\d+", capsys.readouterr().out)


def test_a_command_lists_its_options(capsys):
    assert main(["fit", "--help"]) == 0
    assert "--trainer.strategy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("trainer:\n  accelerator: [cpu\nmodel: x\n", "config file bad.yaml, line 3, column 6:"),
        ("trainer:\n\tdevices: 1\n", "config file bad.yaml, line 2, column 1:"),
        ("only text\n", "config file bad.yaml holds a str. It needs the keys trainer:, model:"),
        ("", "config file bad.yaml is empty."),
        (b"\xff\xfe\x00\x01", "config file bad.yaml: "),
        ("trainer: {max_stepz: 3}\n", "bad.yaml: Subcommand 'fit' does not accept option 'trainer.max_stepz'"),
        ("trainer: {max_stepz: 3}\n", "Did you mean 'max_steps'?"),
        ("trainer: {max_steps: many}\n", "bad.yaml: trainer.max_steps: Expected int. Got value: many"),
        ("model: {class_path: no_such_package.Model}\n", "Install 'no_such_package', correct the name"),
        (f"model: {{class_path: {__name__}.Toy, init_args: {{sizes: 3}}}}\n", "Option 'sizes' is not accepted"),
        ("trainer: {max_steps: 1}\n", "Give a config file: lightning-moe fit --config FILE.yaml"),
    ],
)
def test_an_unusable_config_is_refused_in_one_line(config, capsys, content, expected):
    Path("bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["fit", "--config", "bad.yaml"]) == 2
    assert expected in _one_line(capsys)


def test_a_missing_config_names_those_that_are_there(config, capsys):
    config("present.yaml")
    assert main(["fit", "--config=absent.yaml"]) == 2
    assert "config file 'absent.yaml' does not exist. Config files in .: present.yaml" in _one_line(capsys)


def test_an_optimizer_outside_the_model_is_refused(config, capsys):
    name = config()
    Path(name).write_text(Path(name).read_text() + "optimizer: {class_path: torch.optim.Adam}\n")
    assert main(["fit", "--config", name]) == 2
    assert "Set it in model.init_args" in _one_line(capsys)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("moe_epp", "strategy='moe_epp'"),
        (
            {"class_path": "lightning_moe.ExpertParallelStrategy", "init_args": {"dispatcher": "pigeon"}},
            "run.yaml: dispatcher='pigeon' is not known",
        ),
        (
            {"class_path": "lightning_moe.ExpertParallelStrategy", "init_args": {"experts": 2}},
            "Option 'experts' is not accepted. `lightning-moe fit --trainer.strategy.help lightning_moe.Expert",
        ),
    ],
)
def test_a_refused_strategy_option_is_one_line(config, capsys, strategy, expected):
    assert main(["fit", "--config", config(strategy=strategy)]) == 2
    assert expected in _one_line(capsys)


def test_a_fault_in_a_users_class_keeps_its_traceback(config):
    with pytest.raises(ValueError, match="a fault of the user's class") as caught:
        main(["fit", "--config", config(model="Broken")])
    assert caught.traceback[-1].path == Path(__file__)


def test_fit_says_where_results_lie_and_the_command_to_go_on_works(config, capsys):
    assert main(["fit", "--config", config()]) == 0
    said = dict(re.findall(r"^(logs|checkpoints|watch|go on) +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert (Path(said["logs"]) / "config.yaml").is_file()
    (first,) = newest_checkpoints([Path(said["checkpoints"].split(" (")[0])])
    assert first.name in said["checkpoints"]
    assert _steps(first) == 3
    if "watch" in said:
        assert said["watch"] == f"tensorboard --logdir {Path(said['logs']).parent}"

    program, *again = shlex.split(said["go on"])
    assert program == "lightning-moe"
    assert main(again) == 0
    text = capsys.readouterr().out
    assert f"fit continues from {first}" in text
    directory = re.search(r"^checkpoints +(.*) \(newest: ", text, re.MULTILINE)[1]
    (second,) = newest_checkpoints([Path(directory)])
    assert second.parent != first.parent
    assert _steps(second) == 6

    assert main(["validate", "--config", "run.yaml", "--ckpt_path", "last"]) == 0
    assert f"validate continues from {second}" in capsys.readouterr().out


def test_last_reads_a_checkpoint_directory_of_the_config(config, capsys):
    name = config(
        callbacks=[
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"dirpath": "saved", "save_last": True, "every_n_train_steps": 2},
            }
        ],
        logger=False,
    )
    assert main(["fit", "--config", name]) == 0
    assert "go on" in capsys.readouterr().out
    assert main(["fit", "--config", name, "--ckpt_path=last", "--trainer.max_steps", "4"]) == 0
    out = capsys.readouterr().out
    assert "fit continues from saved/" in out
    assert "lightning-moe fit --config run.yaml --ckpt_path last --trainer.max_steps 8" in out
    assert _steps(newest_checkpoints([Path("saved")])[0]) == 4


def test_last_without_a_checkpoint_begins_anew_and_says_so(config, capsys):
    with pytest.warns(UserWarning, match="no checkpoint of .*; training begins at step 0"):
        assert main(["fit", "--config", config(), "--ckpt_path", "last"]) == 0
    assert "go on" in capsys.readouterr().out


def test_last_does_not_take_the_checkpoint_of_another_model(config, capsys):
    assert main(["fit", "--config", config()]) == 0
    capsys.readouterr()
    other = config("other.yaml", model="OtherToy")
    assert main(["test", "--config", other, "--ckpt_path", "last"]) == 2
    assert "ckpt_path 'last': no checkpoint of this config" in _one_line(capsys)


def test_best_is_refused_with_the_paths_there_are(config, capsys):
    assert main(["fit", "--config", config()]) == 0
    capsys.readouterr()
    assert main(["test", "--config", "run.yaml", "--ckpt_path", "best"]) == 2
    assert re.search(r"Give a path: \S+step=3\.ckpt", _one_line(capsys))


def test_the_config_decides_and_not_the_checkpoint(config, capsys):
    name = config()
    assert main(["fit", "--config", name, "--model.init_args.size", "3"]) == 0
    (first,) = Path().glob("lightning_logs/*/checkpoints/*.ckpt")
    options = ["--model.init_args.size", "5", "--trainer.max_steps", "4", "--ckpt_path", str(first)]
    assert main(["fit", "--config", name, *options]) == 0
    newest = newest_checkpoints(list(Path().glob("lightning_logs/*/checkpoints")))[0]
    assert torch.load(newest, weights_only=False)["hyper_parameters"]["size"] == 5


def test_a_distributed_checkpoint_is_refused_where_it_cannot_be_read(config, capsys):
    Path("saved.ckpt").mkdir()
    Path("saved.ckpt/.metadata").touch()
    assert main(["fit", "--config", config(), "--ckpt_path", "saved.ckpt"]) == 2
    line = _one_line(capsys)
    assert "saved.ckpt is a distributed checkpoint" in line
    assert "consolidate_checkpoint saved.ckpt" in line


def test_a_checkpoint_that_is_not_whole_does_not_count(tmp_path):
    (tmp_path / "half.ckpt").mkdir()
    (tmp_path / "half.ckpt" / "__0_0.distcp").touch()
    assert newest_checkpoints([tmp_path]) == []
    (tmp_path / "half.ckpt" / ".metadata").touch()
    assert newest_checkpoints([tmp_path]) == [tmp_path / "half.ckpt"]


def test_the_console_script_starts_the_other_ranks(config):
    """Lightning runs sys.argv again for rank 1, so the script itself has to take part."""
    name = config(strategy="moe_ep", devices=2, enable_model_summary=True)
    option = ["--trainer.strategy.expert_parallel_size", "1"]
    beside = Path(sys.executable).parent / "lightning-moe"
    program = [str(beside)] if beside.exists() else [shutil.which("lightning-moe") or "lightning-moe"]
    done = in_subprocess([*program, "fit", "--config", name, *option], timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("LeafSpec|litlogger|litmodels|Tip:", done.stdout + done.stderr)
    assert "Starting with 2 processes" in done.stdout + done.stderr
    assert done.stdout.count("go on") == 1
    assert "--trainer.strategy.expert_parallel_size 1" in done.stdout
    assert len(list(Path().glob("lightning_logs/*/checkpoints/*.ckpt"))) == 1


def _fit_on_two_ranks(config, **trainer):
    command = [sys.executable, "-m", "lightning_moe", "fit", "--config"]
    name = config(strategy="moe_ep", devices=2, **trainer)
    return in_subprocess([*command, name], timeout=120, env={"PYTHONPATH": str(ROOT)})


def test_a_mistake_that_all_ranks_find_is_one_line(config):
    strategy = {"class_path": "lightning_moe.ExpertParallelStrategy", "init_args": {"expert_parallel_size": 3}}
    name = config(strategy=strategy, devices=2)
    command = [sys.executable, "-m", "lightning_moe", "fit", "--config", name]
    done = in_subprocess(command, timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    text = done.stdout + done.stderr
    assert text.count("expert_parallel_size=3") == 1
    assert "Traceback" not in text
    assert "run.yaml: expert_parallel_size=3 must be" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("mistake", [True, False])
def test_what_one_rank_meets_alone_is_shown(config, mistake):
    callback = {"class_path": f"{__name__}.FailsAlone", "init_args": {"mistake": mistake}}
    done = _fit_on_two_ranks(config, callbacks=[callback])
    last = done.stderr.splitlines()[-1]
    if mistake:
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert last.startswith("[rank 1] lightning-moe: error: run.yaml: expert_parallel_size=7")
    else:
        assert done.returncode == 1
        assert done.stderr.count("ValueError: a fault on one rank") == 1
        assert last.startswith("lightning-moe: error: rank 1 ended with exit code 1: what it printed is above")


def test_a_fault_in_training_keeps_its_traceback(config):
    with pytest.raises(ValueError, match="a fault of the user's step") as caught:
        main(["fit", "--config", config(model="BrokenInTraining")])
    assert caught.traceback[-1].path == Path(__file__)


def test_the_traceback_of_a_mistake_is_shown_on_request(config, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MOE_TRACEBACK", "1")
    name = config(callbacks=[{"class_path": f"{__name__}.RefusesAll"}])
    with pytest.raises(ValueError, match="expert_parallel_size=7"):
        main(["fit", "--config", name])


def test_a_mistake_that_is_found_in_training_is_one_line(config, capsys):
    assert main(["fit", "--config", config(callbacks=[{"class_path": f"{__name__}.RefusesAll"}])]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "run.yaml: expert_parallel_size=7" in text.splitlines()[-1]


def test_a_slip_inside_the_package_keeps_its_traceback(config):
    with pytest.raises(TypeError):
        main(["fit", "--config", config(callbacks=[{"class_path": f"{__name__}.Slips"}])])


def test_a_checkpoint_of_another_model_is_refused_in_one_line(config, capsys):
    assert main(["fit", "--config", config()]) == 0
    (first,) = Path().glob("lightning_logs/*/checkpoints/*.ckpt")
    capsys.readouterr()
    content = torch.load(first, weights_only=False)
    content["state_dict"] = {f"other.{key}": value for key, value in content["state_dict"].items()}
    torch.save(content, "other.ckpt")
    assert main(["test", "--config", "run.yaml", "--ckpt_path", "other.ckpt"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "run.yaml: ckpt_path other.ckpt does not fit this model or cannot be read: Error(s) in loading" in last
    assert "layer.weight" in last


def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(config, capsys):
    Path("text.ckpt").write_text("hello")
    assert main(["fit", "--config", config(), "--ckpt_path", "text.ckpt"]) == 2
    assert "ckpt_path text.ckpt does not fit this model or cannot be read" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_missing_checkpoint_is_refused_before_anything_starts(config, capsys, command):
    name = config(strategy="moe_ep", devices=2)
    assert main([command, "--config", name, "--ckpt_path", "absent.ckpt"]) == 2
    assert "ckpt_path 'absent.ckpt' does not exist" in _one_line(capsys)


@pytest.mark.parametrize(("key", "default", "other"), [("model.init_args.size", 3, 5), ("data.init_args.length", 8, 9)])
def test_last_passes_over_runs_of_another_config(config, capsys, key, default, other):
    name = config()
    options = [f"--{key}", str(other)]
    assert main(["fit", "--config", name, *options]) == 0
    (older,) = Path().glob("lightning_logs/*/checkpoints/*.ckpt")
    assert main(["fit", "--config", name]) == 0
    assert main(["fit", "--config", name]) == 0
    Path("lightning_logs/version_2/config.yaml").unlink()
    capsys.readouterr()

    assert main(["validate", "--config", name, "--ckpt_path", "last", *options]) == 0
    out = capsys.readouterr().out
    assert "lightning_logs/version_2/checkpoints is passed over: its run has saved no config.yaml" in out
    assert f"version_1/checkpoints is passed over: its config has {key}: {default}, this one {other}" in out
    assert f"validate continues from {older}" in out

    shutil.rmtree("lightning_logs/version_1")
    assert main(["validate", "--config", name, "--ckpt_path", "last"]) == 2
    captured = capsys.readouterr()
    assert f"version_0/checkpoints is passed over: its config has {key}: {other}, this one {default}" in captured.out
    assert "no checkpoint of this config's model and data" in captured.err


def test_last_goes_on_with_other_hyperparameters_of_the_optimizer(config, capsys):
    name = config()
    assert main(["fit", "--config", name, "--model.init_args.optimizer", "torch.optim.SGD"]) == 0
    again = ["--model.init_args.optimizer", "torch.optim.SGD", "--model.init_args.optimizer.momentum", "0.5"]
    assert main(["test", "--config", name, *again, "--ckpt_path", "last"]) == 0
    assert "test continues from lightning_logs/version_0" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "limit"), [("max_steps", 3), ("max_epochs", 1)])
def test_a_finished_run_says_why_nothing_was_done_and_how_to_go_on(config, capsys, option, limit):
    name = config(**({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 2} if option == "max_epochs" else {}))
    assert main(["fit", "--config", name]) == 0
    capsys.readouterr()
    assert main(["fit", "--config", name, "--ckpt_path", "last"]) == 0
    out = capsys.readouterr().out
    (line,) = re.findall(r"^Nothing was trained: .*$", out, re.MULTILINE)
    assert f"has reached trainer.{option}={limit} already" in line
    assert main(shlex.split(line.split("To go on: lightning-moe ")[1])) == 0
    assert "Nothing was trained" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--trainer.strategy", "moe_ep"], []])
def test_options_of_the_strategy_may_be_given_where_it_is_a_name(config, capsys, given):
    name = config() if given else config(strategy="moe_ep")
    assert main(["fit", "--config", name, *given, "--trainer.strategy.dispatcher", "pigeon"]) == 2
    assert "dispatcher='pigeon' is not known" in _one_line(capsys)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--trainer.maxsteps", "4"],
            "unknown option on the command line: --trainer.maxsteps. Did you mean --",
        ),
        (["--trainer.maxsteps=4"], "line: --trainer.maxsteps. Did you mean --trainer.max_steps"),
        (["--trainer.max_step", "4"], "line: --trainer.max_step. Did you mean --trainer.max_steps"),
        (["--ckpt_pat", "x"], "line: --ckpt_pat. Did you mean --ckpt_path"),
        (["--trainr.max_steps", "4"], "line: --trainr.max_steps. Did you mean --trainer.max_steps"),
    ],
)
def test_an_unknown_option_is_named_with_a_proposal(config, capsys, options, expected):
    assert main(["fit", "--config", config(), *options]) == 2
    assert expected in _one_line(capsys)


def test_a_missing_config_that_is_in_the_folder_of_configs_is_proposed(config, capsys):
    Path("configs").mkdir()
    config("configs/quickstart.yaml")
    assert main(["fit", "--config", "quickstart.yaml"]) == 2
    assert "'quickstart.yaml' does not exist. Did you mean configs/quickstart.yaml?" in _one_line(capsys)
