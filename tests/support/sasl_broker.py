"""Kafka's sign-in by SCRAM in front of a real broker that knows none: what follows a sign-in is passed on unchanged.

Written from Kafka's protocol guide (SaslHandshake is API 17, SaslAuthenticate 36, ApiVersions 18) and RFC 5802. A caller who
sends anything else before signing in, or a wrong proof, is disconnected.
"""

import base64
import hashlib
import hmac
import os
import socket
import struct
import threading
from contextlib import suppress

from tests.support.servers import HOST

_HANDSHAKE, _AUTHENTICATE, _API_VERSIONS = 17, 36, 18
_ITERATIONS = 4_096


class SaslBroker:
    """Listens on `port`, passes on to `to_port` after a sign-in."""

    def __init__(self, port: int, to_port: int, mechanism: str, username: str, password: str) -> None:
        self.num_signed_in = 0
        self.received = b""
        self._to_port = to_port
        self._mechanism = mechanism
        self._username = username
        self._password = password
        self._hash = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
        self._listener = socket.create_server((HOST, port))

    def start(self) -> None:
        """Accept in a thread, each caller in one of its own."""
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Accept no more."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with suppress(OSError, ValueError), caller:
            if self._sign_in(caller):
                self.num_signed_in += 1
                with socket.create_connection((HOST, self._to_port)) as broker:
                    threading.Thread(target=_pump, args=(broker, caller), daemon=True).start()
                    _pump(caller, broker)

    def _sign_in(self, caller: socket.socket) -> bool:
        """Answer until the caller has proved its password; return whether it did."""
        bare, server_first = "", ""
        while True:
            api, version, correlation, body = self._request(caller)
            if api == _API_VERSIONS:
                _answer(caller, correlation, self._api_versions(version))
            elif api == _HANDSHAKE:
                mechanism = self._mechanism.encode()
                _answer(caller, correlation, struct.pack(">hih", 0, 1, len(mechanism)) + mechanism)
            elif api == _AUTHENTICATE:
                said = body[4:].decode()
                if not server_first:
                    bare = said.removeprefix("n,,")
                    server_first = self._challenge(bare)
                    _answer(caller, correlation, _token(server_first))
                    continue
                verdict = self._verify(bare, server_first, said)
                _answer(caller, correlation, _token(verdict) if verdict else _refusal())
                return bool(verdict)
            else:
                return False

    def _request(self, caller: socket.socket) -> tuple[int, int, int, bytes]:
        (length,) = struct.unpack(">i", _read(caller, 4))
        request = _read(caller, length)
        self.received += request
        api, version, correlation, client_len = struct.unpack(">hhih", request[:10])
        return api, version, correlation, request[10 + max(0, client_len) :]

    def _api_versions(self, version: int) -> bytes:
        """Return the broker's API versions and the sign-in's; a newer version of the request is answered by the oldest."""
        with socket.create_connection((HOST, self._to_port)) as broker:
            broker.sendall(struct.pack(">ihhih", 10, _API_VERSIONS, 0, 1, -1))
            (length,) = struct.unpack(">i", _read(broker, 4))
            answer = _read(broker, length)[4:]
        found = struct.iter_unpack(">hhh", answer[6 : 6 + 6 * struct.unpack(">i", answer[2:6])[0]])
        apis = {api: newest for api, _, newest in found} | {_HANDSHAKE: 1, _AUTHENTICATE: 1, _API_VERSIONS: 0}
        listed = b"".join(struct.pack(">hhh", api, 0, newest) for api, newest in apis.items())
        return struct.pack(">hi", 0 if version == 0 else 35, len(apis)) + listed

    def _challenge(self, bare: str) -> str:
        fields = dict(part.split("=", 1) for part in bare.split(","))
        if fields["n"] != self._username:
            raise ValueError("another user")
        salt = base64.b64encode(os.urandom(16)).decode()
        return f"r={fields['r']}{os.urandom(8).hex()},s={salt},i={_ITERATIONS}"

    def _verify(self, bare: str, server_first: str, final: str) -> str | None:
        """Return the server's own proof when the caller's is right."""
        without_proof, _, proof = final.rpartition(",p=")
        salt = base64.b64decode(server_first.split(",s=")[1].split(",i=", maxsplit=1)[0])
        salted = hashlib.pbkdf2_hmac(self._hash, self._password.encode(), salt, _ITERATIONS)
        client_key = hmac.digest(salted, b"Client Key", self._hash)
        stored_key = hashlib.new(self._hash, client_key).digest()
        message = f"{bare},{server_first},{without_proof}".encode()
        signature = hmac.digest(stored_key, message, self._hash)
        expected = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        if not hmac.compare_digest(expected, base64.b64decode(proof)):
            return None
        server_key = hmac.digest(salted, b"Server Key", self._hash)
        return "v=" + base64.b64encode(hmac.digest(server_key, message, self._hash)).decode()


def _token(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">hhi", 0, -1, len(raw)) + raw + struct.pack(">q", 0)


def _refusal() -> bytes:
    return struct.pack(">hhi", 58, -1, 0) + struct.pack(">q", 0)


def _answer(caller: socket.socket, correlation: int, body: bytes) -> None:
    caller.sendall(struct.pack(">ii", len(body) + 4, correlation) + body)


def _read(line: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = line.recv(num_bytes - len(data))
        if not chunk:
            raise OSError("hung up")
        data += chunk
    return data


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(65_536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
