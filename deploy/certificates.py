"""Certificates for a cluster that has none: an authority of its own, and pairs of key and certificate that it signed.

Writes PEM files into a folder, keys with mode 0600. Promises: an authority that is there signs, and is not made anew; no key leaves
its file. For a test cluster, or a small one of one's own: whoever has an authority already uses that, and needs none of this.
"""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..schemas.errors import SetupError

AUTHORITY, SERVER, CLIENT = "ca", "server", "client"
AUTHORITY_DAYS = 3650
_CLOCKS_APART = timedelta(minutes=10)


def certificate_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.pem"


def key_file(folder: Path, name: str) -> Path:
    return folder / f"{name}-key.pem"


def client_files(folder: Path) -> dict[str, Path | None]:
    """Those that are there, by what they are: for who connects."""
    files = {"CA": certificate_file(folder, AUTHORITY), "CERT": certificate_file(folder, CLIENT), "KEY": key_file(folder, CLIENT)}
    return {what: path if path.exists() else None for what, path in files.items()}


def write_certificates(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """The authority when there is none, and a new certificate for servers and one for clients. Raises SetupError."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if not certificate_file(folder, AUTHORITY).exists():
        written += _write(folder, AUTHORITY, *_authority())
    authority, authority_key = _read(folder)
    names = x509.SubjectAlternativeName([_name(host) for host in hosts])
    # Servers of a cluster are each other's clients.
    uses = {SERVER: [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH], CLIENT: [ExtendedKeyUsageOID.CLIENT_AUTH]}
    for name, purposes in uses.items():
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(f"jetwake {name}", key, days).issuer_name(authority.subject)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        if name == SERVER:
            builder = builder.add_extension(names, critical=False)
        written += _write(folder, name, builder.sign(authority_key, hashes.SHA256()), key)
    return written


def _authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "jetwake authority")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = _builder("jetwake authority", key, AUTHORITY_DAYS).issuer_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(usage, critical=True)
    return builder.sign(key, hashes.SHA256()), key


def _builder(name: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # no address, so a name
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise SetupError(f"{host!r} is neither a host name nor an address") from error


def _read(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file(folder, AUTHORITY).read_bytes())
        key = serialization.load_pem_private_key(key_file(folder, AUTHORITY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(f"{folder} has an authority whose certificate or key cannot be read: {type(error).__name__}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SetupError(f"{key_file(folder, AUTHORITY)} is not a key that this command made")
    return certificate, key


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    descriptor = os.open(key_file(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private)
    certificate_file(folder, name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return [certificate_file(folder, name), key_file(folder, name)]
