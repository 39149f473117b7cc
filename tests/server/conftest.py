from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.model_folders import add_model
from support.server_process import ServerProcess
from support.tiny_model import build_tiny_model
from tengserve_adapter.grpc.settings import TlsFiles


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with one random llama, "tiny"."""
    repository = tmp_path_factory.mktemp("repository")
    build_tiny_model(add_model(repository, "tiny"))
    return repository


@pytest.fixture(scope="module")
def tiny_server(tiny_repository: Path) -> Iterator[ServerProcess]:
    """A server with the model "tiny", ready; tests leave it as they found it."""
    with ServerProcess("--model-repository", str(tiny_repository)) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def scripted_repository(tmp_path: Path) -> Path:
    """A model repository for scripted servers, which need no weights."""
    repository = tmp_path / "repository"
    add_model(repository, "scripted")
    return repository


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A certificate of 127.0.0.1 by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files
