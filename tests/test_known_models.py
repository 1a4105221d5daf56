"""Configs by name: sizes that are here, folders and files, and one line where there is nothing."""

import json
import socket

import pytest
import tiny_models
import torch

from zorro_verl.estimate import ModelSize
from zorro_verl.known_models import config_of

# Parameters in billions as the models' makers state them: in all, and without embedding and head.
PUBLISHED = {
    "Qwen3-0.6B": (0.6, 0.44),
    "Qwen3-1.7B": (1.7, 1.4),
    "Qwen3-4B": (4.0, 3.6),
    "Qwen3-8B": (8.2, 6.95),
    "Qwen3-14B": (14.8, 13.2),
    "Qwen3-32B": (32.8, 31.2),
    "Qwen3-30B-A3B": (30.5, 29.9),
    "Qwen3-235B-A22B": (235, 234),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_published_models(name):
    total, without_embedding = PUBLISHED[name]
    config = config_of(name)
    size = ModelSize.of(config)
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    assert size.total / 1e9 == pytest.approx(total, rel=0.015)
    assert (size.total - tables) / 1e9 == pytest.approx(without_embedding, rel=0.01)


def test_with_and_without_the_owner_and_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in PUBLISHED:
        assert config_of(name).to_dict() == config_of(f"Qwen/{name}").to_dict()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "Qwen3-8B"
    tiny_models.build("qwen3", torch.float32).config.save_pretrained(path)
    return path


def test_a_folder_and_its_config_file(folder, monkeypatch):
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    assert config_of(str(folder)).hidden_size == config_of(str(folder / "config.json")).hidden_size == hidden != 4096
    monkeypatch.chdir(folder)
    assert config_of("config.json").hidden_size == hidden
    monkeypatch.chdir(folder.parent)
    assert config_of("Qwen3-8B").hidden_size == hidden, "a folder of that name is meant"


@pytest.mark.parametrize("name", ["./nothing", "/nowhere/config.json", "sizes.json"])
def test_nothing_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model: expected a (checkpoint folder|config\.json)"):
        config_of(name)


def test_an_unknown_name_without_a_network_names_the_known_ones(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("zorro_verl.checkpoint.get_hf_file_metadata", unreachable)
    with pytest.raises(
        ValueError, match=r"nobody/no-model.*no network.*known without a network: Qwen3-0.6B, "
    ) as error:
        config_of("nobody/no-model")
    assert str(error.value).endswith(", ".join(PUBLISHED))


def test_an_unsupported_model_says_so(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type: expected a supported one, got 'gpt2'"):
        config_of(str(folder))
