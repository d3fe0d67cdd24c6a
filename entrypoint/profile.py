"""A site's profile: clusters/NAME.yaml, read by the entrypoint for what concerns the launch.

The secret: the file's layout. The option names of the command line that a site may set stand under
`launch`, variables for the workers under `env`; `host_suffix` turns a node's name into that of its fast
network (such as -hsn); run directories lie under `scratch`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrypoint.errors import BadInput
from entrypoint.options import OPTIONS

CLUSTERS = Path(__file__).parent.parent / "clusters"
KEYS = ("env", "host_suffix", "launch", "scratch")


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str = ""
    """The file's name, as `sources` shows it; empty for no profile."""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Option name (with dashes) to value."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every worker, such as NCCL's."""
    host_suffix: str = ""
    """Appended to a node's name to get the name of its address for the rendezvous."""
    scratch: str = ""
    """Where run directories lie, with $USER and other variables; empty: the submit directory."""


def load(name: str) -> Profile:
    """The profile of that name or path. Raises BadInput when it cannot be read or has an unknown key."""
    path = Path(name) if "/" in name or name.endswith(".yaml") else CLUSTERS / f"{name}.yaml"
    try:
        import yaml
    except ImportError:
        raise BadInput(
            f"--profile {name} needs the Python package pyyaml: use the project's venv (make venv), "
            "or python3 -m pip install --user pyyaml"
        ) from None
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadInput(f"--profile {name}: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise BadInput(f"--profile {name}: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise BadInput(f"--profile {name}: {path} must hold a mapping with the keys {', '.join(KEYS)}")
    _only(content, KEYS, path)
    given = _mapping(content, "launch", path)
    launch = {str(key).replace("_", "-"): value for key, value in given.items() if value is not None}
    _only(launch, [option.name for option in OPTIONS if option.in_profile], path)
    return Profile(
        name=path.name,
        launch=launch,
        env=_variables(_mapping(content, "env", path), path),
        host_suffix=str(content.get("host_suffix") or ""),
        scratch=str(content.get("scratch") or ""),
    )


def _variables(given: Mapping[Any, Any], path: Path) -> dict[str, str]:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise BadInput(f"{path}: env {name} is {value!r}: give text in quotes, or a number")
    if "OMP_NUM_THREADS" in given:
        raise BadInput(f"{path}: env sets OMP_NUM_THREADS: set omp_num_threads under launch")
    return {str(name): str(value) for name, value in given.items()}


def _mapping(content: Mapping[str, Any], key: str, path: Path) -> Mapping[Any, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise BadInput(f"{path}: {key} must be a mapping, found {value!r}")
    return value


def _only(content: Mapping[Any, Any], known: Any, path: Path) -> None:
    if unknown := [str(key) for key in content if key not in known]:
        raise BadInput(f"{path}: unknown key {', '.join(unknown)}: valid are {', '.join(known)}")
