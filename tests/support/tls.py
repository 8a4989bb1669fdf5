"""Certificates of servers that are reached over TLS, and of who may reach an Engine."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = timedelta(days=1)


def self_signed(folder: Path) -> Path:
    """A file with a new key and a certificate of its own for 127.0.0.1, good for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("a server of the tests")
    path = folder / "server.pem"
    _write(path, _pem(key) + _pem(_certificate(name, name, key, key, ["127.0.0.1"], ca=True)))
    return path


def make_certificates(folder: Path, addresses: Sequence[str]) -> None:
    """An authority's ``ca.pem``, a server's ``server-cert.pem`` for these addresses, a client's
    ``cert.pem``, and their keys: the names that Docker's own programs look for. The client's
    ``expired-cert.pem`` has expired.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = _name("an authority of the tests")
    authority = _certificate(issuer, issuer, key, key, ca=True)
    _write(folder / "ca.pem", _pem(authority))
    names = (("the nodes' engines", "server-"), ("the hub", ""), ("the hub", "expired-"))
    for name, prefix in names:
        own = ec.generate_private_key(ec.SECP256R1())
        named = addresses if prefix == "server-" else ()
        lasts = -DAY / 2 if prefix == "expired-" else DAY
        made = _certificate(_name(name), issuer, own, key, named, lasts=lasts)
        _write(folder / f"{prefix}cert.pem", _pem(made))
        _write(folder / f"{prefix}key.pem", _pem(own))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _pem(made: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(made, x509.Certificate):
        return made.public_bytes(serialization.Encoding.PEM)
    return made.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    addresses: Sequence[str] = (),
    *,
    ca: bool = False,
    lasts: timedelta = DAY,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if addresses:
        named = [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
        builder = builder.add_extension(x509.SubjectAlternativeName(named), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
