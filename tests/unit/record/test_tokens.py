"""What counts as a secret, and what stands in its place."""

import pytest

from entrypoint.record import tokens

ENV = {"WANDB_API_KEY": "0123456789abcdef", "HOME": "/home/a", "SHORT_TOKEN": "a"}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("hf_abcdefghij", "<secret>"),
        ("--key=0123456789abcdef", "--key=<secret WANDB_API_KEY>"),
        ("use 0123456789abcdef", "use <secret WANDB_API_KEY>"),
        ("https://me:ghs@host/x.git", "https://<secret>@host/x.git"),
        ("git@host:x.git", "git@host:x.git"),
        ("lr=0.1 max_tokens=4096 tokenizer=gpt2-large", "lr=0.1 max_tokens=4096 tokenizer=gpt2-large"),
        ("api_key=abc", "api_key=<secret>"),
        ('password: "correct horse"', 'password: "<secret>"'),
        ("/home/a/script.py", "/home/a/script.py"),
    ],
)
def test_a_text_is_written_without_its_secrets(text: str, hidden: str) -> None:
    assert tokens.hide(text, ENV) == hidden
    assert tokens.hide(hidden, ENV) == hidden


def test_the_word_behind_an_option_that_names_a_secret_is_hidden() -> None:
    words = ["train.py", "--hub-token", "anything", "--lr", "0.1", "--password", "--fast"]
    hidden = ["train.py", "--hub-token", "<secret>", "--lr", "0.1", "--password", "--fast"]
    assert tokens.hide_words(words, ENV) == hidden


def test_values_are_hidden_by_their_keys_too() -> None:
    found = tokens.hide_values({"a": {"token": "x", "list": ["hf_abcdefgh", 7]}, "lr": 0.1}, ENV)
    assert found == {"a": {"token": "<secret>", "list": ["<secret>", 7]}, "lr": 0.1}


@pytest.mark.parametrize(
    "text", ["+token = 'abcdefghijk'", "+API_KEY=abcdefghijk", "+x = hf_abcdefgh", "+0123456789abcdef"]
)
def test_program_text_with_a_secret_is_known(text: str) -> None:
    assert tokens.found_in(f"--- a\n+++ b\n{text}\n", ENV)


@pytest.mark.parametrize(
    "text", ["+token = read(path)", "+key = lambda pair: pair[0]", "+API_KEY=$OTHER_KEY"]
)
def test_program_text_without_one_is_kept(text: str) -> None:
    assert not tokens.found_in(f"--- a\n+++ b\n{text}\n", ENV)
