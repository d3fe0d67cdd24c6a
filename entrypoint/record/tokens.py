"""What a secret looks like: the shapes of tokens, the names that hold some, and the places where they stand.

Nothing else decides that. `hide_words` is for a command, `hide_values` for JSON, `hide` for a text, and
`found_in` says whether program text holds one. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face, which has 34; hf_trainer.py is none
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|\bsk[-_][A-Za-z0-9_-]{16,}"  # services for language models, and for payment
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}"  # Google
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|eyJ[\w-]{8,512}\.eyJ[\w-]{8,4096}\.[\w-]*"  # JSON web tokens
    # Private keys: to their end, which may be lines below with a rank's mark before each; or what is left of
    # one in a log of which the rest was cut off.
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"(?:[\s\S]{0,4096}?-----END [A-Z ]*PRIVATE KEY-----|(?:\s+[\w+/=]{20,})*)"
    r"|(?<![\w+/=])(?:[\w+/=]{20,80}\s+){1,80}-----END [A-Z ]*PRIVATE KEY-----"
)
"""All of these take a time that grows with the text, and not with its square: a log may be one long word."""
_STRONG = (
    *("secret", "secrets", "passwd", "password", "passphrase", "passcode", "apikey"),
    *("credential", "credentials", "authorization", "secretkey", "accesskey", "apikeys"),
)
"""A part of a name that is one of these says that it holds a secret, or one that ends with it."""
_OF_A_FILE = ("file", "path", "dir", "folder", "name", "id", "type", "length", "len", "env", "var", "helper")
"""Last parts of names that hold something about a secret."""
_LAST = ("key", "pat", "auth", "token", "pass", "pwd", "cookie", "cookies", "jwt", "bearer", "webhook")
"""Last parts of names that hold one."""
_NO_SECRETS = {
    "token": (
        *(
            "pad",
            "eos",
            "bos",
            "mask",
            "unk",
            "sep",
            "cls",
            "image",
            "audio",
            "video",
            "vision",
            "special",
            "per",
        ),
        *(
            "start",
            "end",
            "stop",
            "max",
            "min",
            "num",
            "n",
            "new",
            "tool",
            "prefix",
            "suffix",
            "next",
            "extra",
        ),
        *("begin", "decoder", "forced", "fim", "class", "register", "boi", "eoi"),
    ),
    "key": (
        *("image", "text", "label", "input", "output", "prompt", "sort", "group", "data", "target", "column"),
        *(
            "field",
            "response",
            "question",
            "answer",
            "query",
            "value",
            "primary",
            "metric",
            "monitor",
            "cache",
        ),
        *("index", "batch", "state", "model", "caption", "audio", "video", "public", "chosen", "rejected"),
    ),
    "pass": (
        "two",
        "single",
        "multi",
        "first",
        "second",
        "forward",
        "backward",
        "one",
        "n",
        "num",
        "per",
        "full",
    ),
}
"""What stands before such a part if it is the field's other word: a token of a text, a key of a table."""
_PLACES = (
    "PWD",
    "OLDPWD",
    "APPTAINER_PWD",
    "SINGULARITY_PWD",
    "APPTRAIN_PASS",
    "SSH_AUTH_SOCK",
    "XAUTHORITY",
)
"""Variables that sound like it and hold folders and names."""
_HARMLESS = re.compile(r"(?i)|none|null|true|false|yes|no|on|off|auto|basic|digest|[+-]?[\d.]{1,5}(e-?\d+)?")
"""Values that are no secret, unless the name says it loudly."""
_WORD = re.compile(r"([-+~/]*[\w.-]+)(\s*[=:]\s*)(.+)", re.S)
_ASSIGNED = re.compile(r"(?<![/\w.-])([\w.-]+)=")
_VALUE = re.compile(r"[^\s\"'&;,<]+")
_OPTION = re.compile(r"(?<![\w.-])(--?[A-Za-z][\w.-]*)[\"']?(?:[ \t]|\\\n)+")
"""With its value behind blanks, in a text that is a command line; that may go on behind a backslash."""
_ARGUMENT = re.compile(
    r"\$?\"(?!\s)(?:[^\"\\]|\\.)+\"|\$?'(?!\s)[^']+'"
    r"|[\"']?(?!-[A-Za-z](?:[\s\"';&|]|$)|--[a-z])-?[^\s\"'<;&|-][^\s\"';&|]*",  # no option
    re.S,
)
_KEY = re.compile(r"(?<![\w.-])([\w.-]+):[ \t]*")
_OF_KEY = re.compile(r"[^\s\"',{}<]{6,}")
_BRACES = re.compile(r"\{[^{}\n]*\}")
"""Where a key's value needs no quotes, for YAML and Hydra."""
_QUOTED = re.compile(
    r"(?<![\w.-])([\w.-]+)((?:[\"']\]?)?\s*[=:]\s*[rbfuRBFU]*(?:\"\"\"|'''|[\"']))([^\"'<]+)(?=[\"'])"
)
_SET = re.compile(r"(?<=set)(?:default|env)\(\s*[\"']([\w.-]+)([\"'],\s*[rbfuRBFU]*[\"'])([^\"'<]+)(?=[\"'])")
"""A name and its value as setdefault and setenv take them."""
_LOGIN = re.compile(r"(?<=://)[^/\s?#<\"']+(?=@)")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:x-)?api-key|(?:set-)?cookie|private-token|x-[\w-]{0,60}token)"
    r"([\"']?\s*:\s*[\"']?)([^\s\"'<][^\"'\n]*)"
)
_BEARER = re.compile(r"\b([Bb]earer\s+)([^\s\"'<{$%]+)")
_SIGNED = re.compile(
    r"(?i)([?&](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|access_token|token|key)=)"
    r"([^\s&\"'<]+)"
)
_WEBHOOK = re.compile(
    r"(?i)(https://(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks"
    r"|[\w.-]*webhook\.office\.com)/)([^\s\"'<]+)"
)
_LOGS_IN = re.compile(r"(\bwandb(?:\.login\s*\(\s*(?:key\s*=\s*)?[\"']|\s+login\s+(?:--\S+\s+)*))(\w{8,})")
_PLACES_IN_TEXT = (_HEADER, _BEARER, _SIGNED, _WEBHOOK, _LOGS_IN)
"""Each with what it keeps, and last what it hides."""
_EXPORTED = re.compile(
    r"^[+ -]?[ \t]*(?:(?:export|set|ENV)[ \t]+(?=[A-Za-z_])|(?=[A-Z0-9_]+=))(\w+)=[^\s$<(\[{]+", re.M
)
_BARE = re.compile(r"^[+ -]?([ \t]*)([\w.-]+)([ \t]*)=[ \t]*([^\s$<(\[{\"'.,]{6,})[ \t]*$", re.M)
"""A line of a shell script or of an INI file. With blanks it may be one of a program as well."""
_RANDOM = re.compile(
    r"(?=(?:[A-Za-z+/=-]{0,200}\d){2})(?=[\d+/=-]{0,200}[A-Za-z])[A-Za-z\d+/=-]{12,}(?![\w.(\[-])"
)
"""A word that no program has for a name: long, with two figures or more."""
_COMMENT = re.compile(r"(?:#|//|--|;)([^\n]*)")
_SAID = re.compile(r"(?<![\w.-])([\w.-]+)\s*[=:]\s*(?=[^\s$<])")
_LISTED = re.compile(r"^[+ -][ \t]*(?:-[ \t]+)?([\w.-]+):[ \t]+([^\s$<{\[|>#(,\"']+)[ \t]*$", re.M)
_TYPES = ("str", "int", "bytes", "bool", "float", "None", "Any", "object", "dict", "list", "SecretStr")
_HEX = re.compile(r"(?<![\w:.-])(?!sha256)[0-9a-f]{32,}(?![\w-])")
_HEADS = re.compile(r"^(?:(?:index|From|commit|diff) .*|[+-]Subproject commit [0-9a-f]+(?:-dirty)?)$", re.M)
HIDDEN = "<secret>"
SHORTEST = 6
"""Characters of a variable's value that is looked for in other texts."""


@lru_cache(maxsize=4096)  # each text is compared with the whole environment
def names_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds one."""
    if name in _PLACES:
        return False
    in_words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    parts = [part.rstrip("0123456789") for part in re.split(r"[_.-]+", in_words)]
    parts = [part for part in parts if part]
    if not parts:
        return False
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if last in _OF_A_FILE:
        return False
    if _is_strong(parts) or (name.isupper() and "token" in parts):
        return True
    return (last in _LAST or last.endswith("token")) and before not in _NO_SECRETS.get(last, ())


def _is_strong(parts: Iterable[str]) -> bool:
    return any(part.endswith(_STRONG) for part in parts)


def _is_secret(name: str, value: str) -> bool:
    """Whether this is the value of a secret of this name."""
    if not value or value.startswith("<secret") or not names_secret(name):
        return False
    return not _HARMLESS.fullmatch(value) or _is_strong(re.split(r"[_.-]+", name.lower()))


def placeholder(name: str) -> str:
    return f"<secret {name}>"


def hide(text: str, env: Mapping[str, str]) -> str:
    """The text with placeholders for what looks like a secret, and for the values of variables that hold one;
    these by their names."""
    text = _hide_values_of(env, text)
    text = _LOGIN.sub(HIDDEN, SHAPES.sub(HIDDEN, text))
    for place in _PLACES_IN_TEXT:
        text = place.sub(_hide_last, text)
    for place in (_QUOTED, _SET):
        text = place.sub(_hide_quoted, text)
    text = _BRACES.sub(lambda m: _hide_behind(_KEY, _OF_KEY, m[0]), text)
    text = _hide_behind(_OPTION, _ARGUMENT, text)
    return _hide_behind(_ASSIGNED, _VALUE, text)


def _hide_quoted(found: re.Match[str]) -> str:
    name, _, value = found.groups()
    return found[0].removesuffix(value) + HIDDEN if _is_secret(name, value) else found[0]


def _hide_behind(names: re.Pattern[str], values: re.Pattern[str], text: str) -> str:
    """Hides the values of secrets. Any other value may hold the name of one, so the search goes on in it."""
    parts: list[str] = []
    done = at = 0
    while found := names.search(text, at):
        at = found.end()
        value = values.match(text, at) if names_secret(found[1]) else None
        if value and _is_secret(found[1], value[0].strip("$\"'")):
            parts += [text[done:at], HIDDEN]
            done = at = value.end()
    return "".join([*parts, text[done:]])


def _hide_last(found: re.Match[str]) -> str:
    *kept, _ = found.groups()
    return "".join(kept) + HIDDEN


def _hide_values_of(env: Mapping[str, str], text: str) -> str:
    held = {value: name for name, value in env.items() if len(value) >= SHORTEST and _is_secret(name, value)}
    for value in sorted(held, key=len, reverse=True):
        text = text.replace(value, placeholder(held[value]))
    return text


def hide_words(words: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """The same of a command; the word behind an option that names one is hidden too."""
    hidden: list[str] = []
    option = ""
    for word in words:
        hidden.append(_hide_word(word, option, env))
        option = word if re.fullmatch(r"--?[\w.-]+", word) and names_secret(word) else ""
    return hidden


def _hide_word(word: str, option: str, env: Mapping[str, str]) -> str:
    """`option`: that stands before it, if it names a secret."""
    known = _hide_values_of(env, word)
    if known != word:
        return hide(known, env)
    if option and _is_secret(option, word) and not re.fullmatch(r"-[A-Za-z]|--[a-z][\w.-]*(=.*)?", word):
        return HIDDEN
    whole = _WORD.fullmatch(word)
    if whole and _is_secret(whole[1], whole[3]):
        return whole[1] + whole[2] + HIDDEN
    return hide(word, env)


def found_in(text: str, env: Mapping[str, str]) -> bool:
    """Whether program text holds a secret. `token = read(path)` is none: what counts is quoted, given to a
    variable of a shell or a key of YAML, or said by a comment."""
    text = _HEADS.sub("", text)
    named = [match[1] for place in (_QUOTED, _SET, _EXPORTED) for match in place.finditer(text)]
    named += [match[1] for comment in _COMMENT.finditer(text) for match in _SAID.finditer(comment[1])]
    named += [match[1] for match in _LISTED.finditer(text) if match[2] not in _TYPES]
    named += [
        name
        for indent, name, blank, value in _BARE.findall(text)
        if not indent + blank or _RANDOM.fullmatch(value)
    ]
    return (
        any(place.search(text) for place in (SHAPES, _LOGIN, _HEX, *_PLACES_IN_TEXT))
        or _hide_values_of(env, text) != text
        or any(map(names_secret, named))
        or any(_has_random(place, text) for place in (_OPTION, _ASSIGNED))
        or any(_has_random(_KEY, braces) for braces in _BRACES.findall(text))
    )


def _has_random(names: re.Pattern[str], text: str) -> bool:
    """Whether the value of a secret is one that no program has for a name. Any other value may be part of a
    very long word, and is not looked at."""
    return any(
        names_secret(found[1]) and _RANDOM.match(text, found.end() + text.startswith(("'", '"'), found.end()))
        for found in names.finditer(text)
    )


def hide_values(value: object, env: Mapping[str, str], name: str = "") -> object:
    """The same of a JSON value, with all that it holds."""
    if isinstance(value, Mapping):
        return {key: hide_values(item, env, str(key)) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [hide_values(item, env, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if _is_secret(name, value) else hide(value, env)
    return value
