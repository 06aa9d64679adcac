"""The listening socket."""

from __future__ import annotations

import socket
import sys

from millstream.config import ServerConfig
from millstream.errors import ConfigError

BACKLOG = 2048


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, bound and kept: nobody can take the port before the server uses it.

    Raises ConfigError, naming --host or --port.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host is {config.host!r}: it is no address of this machine ({e})") from e
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"--port is {config.port}: can't listen on {config.host}:{config.port} ({e.strerror}); "
            "choose another one, 0 takes any that is free"
        ) from e
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
