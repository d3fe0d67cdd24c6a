"""Digests from a registry."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from containers import registry
from containers.stacks import BuildRefused


@pytest.fixture
def a_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, dict[str, str], bytes]]]:
    """What it answers: path to status, headers and body. It wants the token `t`, which it gives to anybody."""
    answers: dict[str, tuple[int, dict[str, str], bytes]] = {}

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answers.get(self.path, (404, {}, b""))
            if self.path.startswith("/token?"):
                status, headers, body = 200, {}, b'{"token": "t"}'
            elif self.headers["Authorization"] != "Bearer t":
                challenge = f'Bearer realm="http://127.0.0.1:{server.server_port}/token",scope="pull"'
                status, headers, body = 401, {"WWW-Authenticate": challenge}, b""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("REGISTRY", f"127.0.0.1:{server.server_port}/proxy/")
        monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
        yield answers
        server.shutdown()
        thread.join(10)


def test_a_tag_gives_a_digest_for_each_architecture(
    a_registry: dict[str, tuple[int, dict[str, str], bytes]],
) -> None:
    manifests = [
        {"digest": f"sha256:{name}", "platform": {"os": system, "architecture": name}}
        for system, name in (("windows", "amd64-no"), ("linux", "amd64"), ("linux", "arm64"))
    ]
    body = json.dumps({"manifests": manifests}).encode()
    a_registry["/v2/proxy/debian/manifests/trixie-slim"] = (200, {"Content-Type": registry.LISTS[0]}, body)
    both = {"amd64": "sha256:amd64", "arm64": "sha256:arm64"}
    assert registry.digests("debian:trixie-slim", ["amd64", "arm64"]) == both
    with pytest.raises(BuildRefused) as refusal:
        registry.digests("debian:trixie-slim", ["riscv64"])
    assert str(refusal.value) == (
        f"REGISTRY={registry.address()}: debian:trixie-slim is not there for riscv64, only for amd64, arm64"
    )


def test_a_registry_without_the_image_is_refused(
    a_registry: dict[str, tuple[int, dict[str, str], bytes]],
) -> None:
    assert a_registry == {}
    with pytest.raises(BuildRefused) as refusal:
        registry.digests("debian:trixie-slim", ["amd64"])
    assert str(refusal.value) == (
        f"REGISTRY={registry.address()}: it does not give debian:trixie-slim (404 Not Found)"
    )
