"""`check` refuses a model directory that its replica would refuse, and starts nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.cli_models import check_models
from offbeat.config import Config
from offbeat.errors import UserError
from offbeat.testing.tiny import make_tiny_model, make_tiny_scorer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "actor", characters="abc>")
    make_tiny_model(folder / "judge")
    make_tiny_scorer(folder / "scorer")
    return folder


def run_of(models: Path, scorer: dict[str, object] | None = None, **judge: object) -> Config:
    """A run with a judge and a scorer on the directories of their names."""
    reward = {
        "j": {"kind": "genrm", "model": str(models / "judge"), **judge},
        "s": {"kind": "disrm", "model": str(models / "scorer"), **(scorer or {})},
    }
    path = str(models / "actor")
    whole = {"run": "r", "model": {"path": path}, "data": {"train": "t"}, "reward": reward}
    return Config.model_validate(whole)


def lose_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{ this is", encoding="utf-8")


def describe(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")


def two_labels(folder: Path) -> None:
    describe(folder, id2label={"0": "no", "1": "yes"})


def a_classifier(folder: Path) -> None:
    describe(folder, architectures=["BertForSequenceClassification"])


def test_whole_models_are_accepted(models: Path) -> None:
    check_models(run_of(models), assumed=False)


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("judge", lose_tokenizer, "reward.j.model: .*no tokenizer that loads .it has no vocab"),
        ("judge", break_config, "reward.j.model: .*config.json is not valid JSON"),
        ("judge", a_classifier, "reward.j.model: .*classifies .* give a causal language model"),
        ("actor", break_config, "model.path: .*config.json is not valid JSON"),
        ("actor", a_classifier, "model.path: .*classifies"),
        ("scorer", lose_tokenizer, "reward.s.model: .*no tokenizer that loads"),
        ("scorer", two_labels, r"reward.s.model: .*has 2 labels \(no, yes\); set label to"),
    ],
)
def test_models_that_cannot_play_their_role_are_refused_by_setting(
    models: Path, tmp_path: Path, role: str, change: Callable[[Path], None], said: str
) -> None:
    copy = tmp_path / "models"
    shutil.copytree(models, copy)
    change(copy / role)
    with pytest.raises(UserError, match=said):
        check_models(run_of(copy), assumed=False)


def a_writer(folder: Path) -> None:
    """The weights of a causal language model in the scorer's place."""
    shutil.copy(folder.parent / "actor" / "model.safetensors", folder / "model.safetensors")
    describe(folder, architectures=["LlamaForCausalLM"])


def test_a_model_that_writes_is_no_scorer(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models, tmp_path / "models")
    describe(tmp_path / "models" / "scorer", architectures=["BertLMHeadModel"])
    check_models(run_of(tmp_path / "models"), assumed=False)  # it has a head for scores too
    a_writer(tmp_path / "models" / "scorer")
    with pytest.raises(UserError, match=r"reward\.s\.model: .*writes text \(LlamaForC"):
        check_models(run_of(tmp_path / "models"), assumed=False)


def of_tokens(folder: Path) -> None:
    two_labels(folder)
    describe(folder, architectures=["BertForTokenClassification"])


@pytest.mark.parametrize("change", [two_labels, of_tokens])
def test_labels_are_looked_up_in_config_json_alone(
    models: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    shutil.copytree(models, tmp_path / "models")
    change(tmp_path / "models" / "scorer")
    for fits in ({"label": "yes"}, {"label": 0}, {"label_values": {"no": -1, "yes": 1}}):
        check_models(run_of(tmp_path / "models", fits), assumed=False)
    for wrong, said in (
        ({"label": "maybe"}, r"reward\.s\.label: 'maybe' is no label: .* the labels no, yes; give"),
        ({"label_values": {"yes": 1}}, r"reward\.s\.label_values: .* also has no; give each"),
    ):
        with pytest.raises(UserError, match=said):
            check_models(run_of(tmp_path / "models", wrong), assumed=False)
    with pytest.raises(UserError, match=r"reward\.s\.label: .* has one logit"):
        check_models(run_of(models, {"label": "yes"}), assumed=False)


def test_a_judge_must_have_the_template_and_spell_the_form_that_are_asked_of_it(
    models: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no chat template; set chat = false"):
        check_models(run_of(models, chat=True), assumed=False)
    shutil.copytree(models, tmp_path / "models")
    shutil.rmtree(tmp_path / "models" / "judge")
    shutil.copytree(models / "actor", tmp_path / "models" / "judge")
    check_models(run_of(tmp_path / "models", engine="vllm"), assumed=False)
    with pytest.raises(UserError, match="tokenizer cannot spell"):
        check_models(run_of(tmp_path / "models", engine="vllm", structured="on"), assumed=False)


def test_models_of_another_cluster_may_be_missing(models: Path, tmp_path: Path) -> None:
    check_models(run_of(tmp_path), assumed=True)
    with pytest.raises(UserError, match="cannot be read"):
        check_models(run_of(tmp_path), assumed=False)
