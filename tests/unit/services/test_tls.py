"""Certificates as they are made, and what a process makes of a folder of them."""

from __future__ import annotations

import re
import shlex
import ssl
import stat
from pathlib import Path

import pytest

from services.run_store.client import reached_by
from services.security.certificates import make_host, open_authority
from services.security.keys import KeyPlaces, without_keys
from services.security.permissions import is_unspecified
from services.security.tls import PLAIN, PUBLIC, Trust, read_tls, read_trust
from services.wire.errors import UsageError
from tests.support.certificates import Certificates, make_certificates
from tests.support.mesh_command import run_command
from weight_bus.vllm.endpoints import check_served_by_tls, read_settings


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of all that is there."""
    return {
        str(path.relative_to(folder)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_command_makes_what_services_take_and_never_makes_it_anew(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    done = run_command(["keys", "tls", str(folder)])
    assert done.code == 0, done.err
    first = files(folder)
    assert {name: mode for name, (mode, _) in first.items()} == {
        "authority.key": 0o600,
        "ca.pem": 0o644,
        "localhost/ca.pem": 0o644,
        "localhost/cert.pem": 0o644,
        "localhost/key.pem": 0o600,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for host in ("localhost", "127.0.0.1", "::1"):
        assert read_tls(folder / "localhost").own_url(host, 1).startswith("https://")
    again = run_command(["keys", "tls", str(folder), "localhost", "gateway,10.0.0.5", "*.mesh.internal"])
    assert again.code == 0, again.err
    assert f"kept {folder}/localhost" in again.out
    later = files(folder)
    assert {name: later[name] for name in first} == first
    assert set(later) - set(first) == {
        f"{host}/{name}.pem" for host in ("gateway", "mesh.internal") for name in ("ca", "cert", "key")
    }
    gateway, wild = read_tls(folder / "gateway"), read_tls(folder / "mesh.internal")
    assert gateway.own_url("0.0.0.0", 8000, "https://gateway:8000/") == "https://gateway:8000"
    assert gateway.own_url("10.0.0.5", 8000) == "https://10.0.0.5:8000"
    assert wild.own_url("0.0.0.0", 1, "https://a1b2.mesh.internal:1") == "https://a1b2.mesh.internal:1"
    assert gateway.trust == Trust(folder / "gateway" / "ca.pem")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tls", "no host"], "no name of a host"),
        (["tls", "../up"], "no name of a host"),
        (["file"], "no authority in"),
        (["tls", "--days", "0"], "days"),
    ],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "file").write_text("")
    done = run_command(["keys", "tls", str(tmp_path / arguments[0]), *arguments[1:]])
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not [name for name in files(tmp_path) if name.endswith("cert.pem")]


def test_certificates_are_made_only_where_their_authority_was(tmp_path: Path) -> None:
    open_authority(tmp_path)
    (tmp_path / "authority.key").unlink()
    with pytest.raises(UsageError, match=r"without authority\.key"):
        open_authority(tmp_path)


def test_the_documented_commands_make_the_documented_folders(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/keys.md").read_text()
    lines = [shlex.split(line) for line in re.findall(r"^\$ rollmesh (keys tls .*)$", text, flags=re.MULTILINE)]
    assert len(lines) == 2
    for words in lines:
        done = run_command(words, cwd=tmp_path)
        assert done.code == 0, done.err
    hosts = {"localhost", "gateway", "rollout-1", "rollout-2", "trainer", "mesh.internal"}
    assert {path.name for path in (tmp_path / "tls").iterdir() if path.is_dir()} == hosts
    for named in re.findall(r"--tls-dir (tls/\S+)", text):
        read_tls(tmp_path / named)


def test_strict_clients_take_the_certificates(certificates: Certificates) -> None:
    """As Python 3.13 does by default."""
    trust = certificates.mesh.trust
    context = ssl.create_default_context(cafile=str(trust.authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    certificates.shown(certificates.ours).check("127.0.0.1", Trust(trust.authority, context))


def test_a_service_does_not_start_with_a_certificate_that_its_callers_would_refuse(
    certificates: Certificates, tmp_path: Path
) -> None:
    mesh = certificates.mesh
    assert mesh.own_url("127.0.0.1", 8000) == "https://127.0.0.1:8000"
    assert mesh.own_url("::1", 8000) == "https://[::1]:8000"
    assert mesh.own_url("0.0.0.0", 8000) == "https://0.0.0.0:8000"
    with pytest.raises(UsageError, match=r"callers of 10\.0\.0\.1 would refuse .*cert\.pem"):
        mesh.own_url("10.0.0.1", 8000)
    with pytest.raises(UsageError, match="plain HTTP"):
        mesh.own_url("127.0.0.1", 8000, "http://127.0.0.1:8000")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, folder in (("ca", certificates.strange), ("cert", certificates.ours), ("key", certificates.ours)):
        (mixed / f"{name}.pem").write_bytes((folder / f"{name}.pem").read_bytes())
    with pytest.raises(UsageError, match=r"would refuse .*cert\.pem \(unable to get local issuer"):
        read_tls(mixed).own_url("127.0.0.1", 8000)
    expired, _ = make_host(tmp_path, ["127.0.0.1"], open_authority(tmp_path), days=0)
    with pytest.raises(UsageError, match="has expired"):
        read_tls(expired).own_url("127.0.0.1", 8000)


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
@pytest.mark.parametrize("spoilt", ["missing", "no PEM", "another's"])
def test_a_folder_that_is_not_whole_is_no_plain_http(
    certificates: Certificates, tmp_path: Path, name: str, spoilt: str
) -> None:
    for each in certificates.ours.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    file = tmp_path / f"{name}.pem"
    if spoilt == "missing":
        file.unlink()
    elif spoilt == "no PEM":
        file.write_text("nothing")
    else:
        file.write_bytes((certificates.strange / file.name).read_bytes())
    with pytest.raises(UsageError, match=r"rollmesh keys tls") as refused:
        read_tls(tmp_path).own_url("127.0.0.1", 1)
    assert f"{name}.pem" in str(refused.value)


def test_without_a_folder_all_is_as_it_was() -> None:
    assert read_tls(None) == PLAIN
    assert read_trust(None) == PUBLIC
    assert PLAIN.own_url("0.0.0.0", 8000) == "http://0.0.0.0:8000"
    assert PLAIN.own_url("0.0.0.0", 8000, "https://behind.a.proxy/") == "https://behind.a.proxy"
    assert PUBLIC.address("http://127.0.0.1:1/") == "http://127.0.0.1:1"
    assert PUBLIC.verify is True


def test_a_mesh_with_an_authority_calls_nobody_over_plain_http(certificates: Certificates) -> None:
    trust = certificates.mesh.trust
    assert trust.address("https://gateway:8000/") == "https://gateway:8000"
    with pytest.raises(UsageError, match=r"http://gateway:8000 is plain HTTP"):
        trust.address("http://gateway:8000")


def test_addresses_outside_are_also_verified_by_the_systems_authorities(certificates: Certificates) -> None:
    inside, outside = certificates.mesh.trust, read_trust(certificates.ours, public=True)
    assert isinstance(inside.verify, ssl.SSLContext)
    assert isinstance(outside.verify, ssl.SSLContext)
    assert len(inside.verify.get_ca_certs()) == 1
    certificates.shown(certificates.ours).check("127.0.0.1", outside)
    for context in (inside.verify, outside.verify):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_redis_is_verified_by_the_same_authority(certificates: Certificates) -> None:
    from redis.asyncio.connection import SSLConnection, parse_url

    trust = certificates.mesh.trust
    found = parse_url(reached_by("rediss://redis.internal:6380/2", "secret", trust))
    assert found == {
        **{"host": "redis.internal", "port": 6380, "db": 2, "password": "secret"},
        **{"ssl_ca_certs": str(trust.authority), "connection_class": SSLConnection},
    }
    own = "rediss://redis.internal/?ssl_ca_certs=/mine.pem"
    assert reached_by(own, None, trust) == own
    assert reached_by("redis://redis.internal:6380/2", None, trust) == "redis://redis.internal:6380/2"
    assert reached_by("rediss://redis.internal:6380/2", None) == "rediss://redis.internal:6380/2"


def test_the_folder_is_handed_on_and_kept_back() -> None:
    told = KeyPlaces(tls=Path("/tls")).environ()
    assert told == {"ROLLMESH_TLS_DIR": "/tls"}
    assert without_keys(told | {"HOME": "/root"}) == {"HOME": "/root"}


@pytest.mark.parametrize(("host", "all_of_them"), [("0.0.0.0", True), ("::", True), ("10.0.0.1", False), ("a", False)])
def test_an_address_that_stands_for_all_is_no_name(host: str, all_of_them: bool) -> None:
    assert is_unspecified(host) is all_of_them


def test_a_plain_vllm_is_called_over_tls_and_must_serve_it(certificates: Certificates) -> None:
    told = {"ROLLMESH_RUN_ID": "r", "ROLLMESH_ADMIN_KEY_FILE": "", "ROLLMESH_TLS_DIR": str(certificates.ours)}
    settings = read_settings("127.0.0.1", 8000, told)
    assert settings is not None
    assert (settings.url, settings.tls) == ("https://127.0.0.1:8000", certificates.mesh)
    check_served_by_tls(str(certificates.ours / "cert.pem"), settings)
    with pytest.raises(UsageError, match=rf"--ssl-certfile {certificates.ours}/cert\.pem --ssl-keyfile"):
        check_served_by_tls(None, settings)
    with pytest.raises(UsageError, match=r"callers of 10\.0\.0\.1"):
        read_settings("0.0.0.0", 8000, told | {"ROLLMESH_ENGINE_URL": "https://10.0.0.1:8000"})
    plain = read_settings("127.0.0.1", 8000, {"ROLLMESH_RUN_ID": "r"})
    assert plain is not None
    assert plain.url == "http://127.0.0.1:8000"
    check_served_by_tls(None, plain)
