"""What a secret looks like: the shapes of tokens, and the names of variables and options that hold some.

Nothing else decides that. A text is written down without its secrets, or not at all. Runs with the Python of
a login node, from 3.9 on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{6,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|sk-[A-Za-z0-9_-]{16,}"  # services for language models
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}"  # Google
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_WORDS = ("token", "secret", "passwd", "password", "apikey", "credential", "credentials")
_ASSIGNED = re.compile(r"([\w.-]+)=([^\s\"'&;,<]+)")
_QUOTED = re.compile(r"([\w.-]+)([\"']?\s*[=:]\s*[\"'])([^\"'<]{8,})(?=[\"'])")
_EXPORTED = re.compile(r"^[+ -]?\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=[^\s$<]{6,}", re.M)
_LOGIN = re.compile(r"(?<=://)[^/\s@<]+(?=@)")
HIDDEN = "<secret>"
SHORTEST = 6
"""Characters of a variable's value that is looked for in other texts."""


def names_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds one."""
    parts = re.split(r"[_.-]+", name.lower().strip("-_."))
    return parts[-1] in ("key", "pat", "auth") or any(part.endswith(_WORDS) for part in parts)


def placeholder(name: str) -> str:
    return f"<secret {name}>"


def hide(text: str, env: Mapping[str, str]) -> str:
    """The text with placeholders for what looks like a secret, and for the values of variables that hold one;
    these by their names."""
    text = _hide_values_of(env, text)
    text = _LOGIN.sub(HIDDEN, SHAPES.sub(HIDDEN, text))
    text = _QUOTED.sub(lambda m: m[1] + m[2] + HIDDEN if names_secret(m[1]) else m[0], text)
    return _ASSIGNED.sub(lambda m: f"{m[1]}={HIDDEN}" if names_secret(m[1]) else m[0], text)


def _hide_values_of(env: Mapping[str, str], text: str) -> str:
    held = {value: name for name, value in env.items() if names_secret(name) and len(value) >= SHORTEST}
    for value in sorted(held, key=len, reverse=True):
        text = text.replace(value, placeholder(held[value]))
    return text


def hide_words(words: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """The same of a command; the word behind an option that names one is hidden too."""
    hidden: list[str] = []
    follows = False
    for word in words:
        hidden.append(HIDDEN if follows and not word.startswith("-") else hide(word, env))
        follows = word.startswith("-") and "=" not in word and names_secret(word)
    return hidden


def found_in(text: str, env: Mapping[str, str]) -> bool:
    """Whether program text holds a secret. Less counts than `hide` hides: `token = read(path)` is none."""
    named = [*_QUOTED.finditer(text), *_EXPORTED.finditer(text)]
    return (
        bool(SHAPES.search(text) or _LOGIN.search(text))
        or _hide_values_of(env, text) != text
        or any(names_secret(match[1]) for match in named)
    )


def hide_values(value: object, env: Mapping[str, str], name: str = "") -> object:
    """The same of a JSON value, with all that it holds."""
    if isinstance(value, Mapping):
        return {key: hide_values(item, env, str(key)) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [hide_values(item, env, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and names_secret(name) else hide(value, env)
    return value
