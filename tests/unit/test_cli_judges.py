"""`check` asks the servers of an external judge as a run does when it starts."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.cli_check import settings_text
from offbeat.cli_judges import probe_judges
from offbeat.cluster.plan import plan_pools, resource_map
from offbeat.config import Config, RewardSourceSection
from offbeat.config_reward import without_user
from offbeat.errors import UserError
from offbeat.testing.judge_server import JudgeServer


def probed(*urls: str, **more: Any) -> tuple[list[str], list[str]]:
    section = RewardSourceSection.model_validate(
        {"kind": "genrm", "base_url": urls, "model": "judge"} | more
    )
    said: list[str] = []
    warned: list[str] = []
    probe_judges("judge", section, said.append, warned.append)
    return said, warned


def gone() -> str:
    server = JudgeServer().start()
    server.stop()
    return server.base_url


def test_one_of_two_down_is_a_warning_and_both_a_refusal() -> None:
    down = gone()
    with JudgeServer() as server:
        said, warned = probed(down, server.base_url)
    assert said == [f"reward/judge: {server.base_url} answers (HTTP 200)"]
    (line,) = warned
    assert line.startswith(f"reward/judge: {down} does not answer (")
    assert "a run starts without it" in line
    with pytest.raises(UserError) as refused:
        probed(down, gone())
    assert f"reward.judge.base_url = '{down}' does not answer (" in str(refused.value)
    assert str(refused.value).count("does not answer") == 2


def test_models_that_are_not_there() -> None:
    with JudgeServer(model="a") as one, JudgeServer(model="b") as two:
        with pytest.raises(UserError, match="model is missing; set it to one of the models of"):
            probed(one.base_url, two.base_url, model=None)
        assert probed(one.base_url, one.base_url + "/", model=None)[1] == []
        said, _ = probed(one.base_url, two.base_url, model="a")
        assert said[0].endswith("answers (HTTP 200)")
        assert said[1].endswith("does not list the model 'a'; it has: b")


def test_keys_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with JudgeServer() as server:
        with pytest.raises(UserError, match="JUDGE_KEY is not set"):
            probed(server.base_url, api_key_env="JUDGE_KEY")
        said, _ = probed(server.base_url.replace("http://", "http://user:pw@"))
        assert said == [f"reward/judge: {server.base_url} answers (HTTP 200)"]
    for url in ("host:8000", "http://host:port/v1", "ftp://host/v1"):
        with pytest.raises(UserError, match="is not an http address"):
            probed(url)
    assert without_user("https://user:pw@host:1/v1/") == "https://host:1/v1"


def test_a_user_and_password_of_an_address_are_shown_nowhere() -> None:
    source = RewardSourceSection.model_validate(
        {"kind": "genrm", "base_url": "http://me:secret@host:1/v1", "model": "judge"}
    )
    config = Config.model_validate(
        {"run": "r", "model": {"path": "m"}, "data": {"train": "t"}, "reward": {"judge": source}}
    )
    shown = settings_text(config) + resource_map(plan_pools(config), "cpu", config)
    assert "http://host:1/v1" in shown
    assert "secret" not in shown
