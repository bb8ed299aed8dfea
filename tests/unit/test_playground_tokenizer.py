"""The playground's tokenizer and CLIP are what `transformers` and `open_clip` load by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CLIPTokenizer

from diffrl.errors import UserError
from diffrl_playground import grammar
from diffrl_playground.scenes import prompt_set
from scripts.playground.clip_building import build_clip, clip_config, load_clip, save_clip
from scripts.playground.tokenizer import build_vocabulary, clashes, vocabulary, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, vocabulary(), grammar.LETTERS)
    return path


def test_every_word_of_the_grammar_is_one_token(folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    for word in vocabulary():
        assert tokenizer.tokenize(word) == [word + "</w>"]


def test_quoted_words_are_spelled(folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    assert clashes(vocabulary(), grammar.WORDS) == []
    for word in grammar.WORDS:
        assert tokenizer.tokenize(word) == [word[0], word[1], word[2] + "</w>"]


def test_clashes_are_the_words_that_would_not_be_spelled(folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    tried = [a + v + b for a in "bfhklmnprst" for v in "aeou" for b in "bfhklmnprst"]
    clashing = clashes(vocabulary(), tried)
    assert {"hat", "tan", "bon"} <= set(clashing) and len(clashing) < len(tried) / 5
    assert clashing == [word for word in tried if len(tokenizer.tokenize(word)) < 3]


def test_prompts_of_the_world_fit(folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 16
    for prompt in prompt_set("all", "test"):
        ids = tokenizer(prompt).input_ids
        assert len(ids) <= 16 and tokenizer.unk_token_id not in ids
    text = 'the word "kup" in red on white'
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, padding="max_length").input_ids)
    spelled = ["the</w>", "word</w>", '"</w>', "k", "u", "p</w>", '"</w>', "in</w>", "red</w>", "on</w>", "white</w>"]
    assert tokens == ["<|startoftext|>", *spelled, *["<|endoftext|>"] * 4]


def test_unknown_signs_do_not_end_the_prompt(folder: Path) -> None:
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    ids = tokenizer("a red 7 on white").input_ids
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[3] == tokenizer.unk_token_id
    assert tokenizer.eos_token_id == len(tokenizer) - 1  # CLIP pools at the highest id


def test_a_word_that_is_no_word_is_refused() -> None:
    for word in ("left of", "Red", "a1"):
        with pytest.raises(ValueError, match="lower-case letters or one punctuation mark"):
            build_vocabulary(["red", word])


def test_clip_is_saved_and_loaded_as_open_clip_does(folder: Path, tmp_path: Path) -> None:
    import open_clip

    size = len(json.loads((folder / "vocab.json").read_text()))
    config = clip_config(size, width=32, layers=1, text_width=32, text_layers=1, embed_dim=16)
    model = build_clip(config).eval()
    save_clip(model, config, folder, tmp_path)
    loaded, tokenize, preprocess = load_clip(tmp_path)
    ids = tokenize(["a red circle on white", 'the word "kup" in red on white'])
    assert ids.shape == (2, 16) and ids[0, 0] == ids[1, 0] == size - 2 and (ids[0, 6:] == size - 1).all()
    assert preprocess["size"] == (64, 64) and list(preprocess["mean"]) == [0.5, 0.5, 0.5]
    images = torch.randn(2, 3, 64, 64)
    for mine, theirs in zip(model(images, ids), loaded(images, ids), strict=True):
        assert torch.equal(mine, theirs)
    direct, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    assert torch.equal(direct.eval().encode_text(ids), model.encode_text(ids))


def test_a_folder_without_a_model_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"open_clip_config\.json is missing"):
        load_clip(tmp_path)
