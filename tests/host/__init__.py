"""A test host: Debian with real Apptainer and ordinary users, in namespaces of this machine (root, Linux).

    with up("login1", online=True, binds=[Bind(source=checkout, target=checkout)]) as host:
        host.run(["apptainer", "--version"], user="alice")

By hand: `python -m tests.host --help`.
"""

from tests.host.host import NO_USER_NAMESPACES, As, Bind, Host, boot, find, up
from tests.host.places import Refused

__all__ = ["NO_USER_NAMESPACES", "As", "Bind", "Host", "Refused", "boot", "find", "up"]
