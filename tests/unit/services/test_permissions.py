"""Which key grants which scope, and keys by file: never overwritten, never on a command line, never in a log."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.run_store.client import with_password, without_password
from services.security.keys import SessionKeys, key_file, make_keys, read_keys, secret_of_run
from services.security.permissions import (
    GIVEN,
    OFF_LOOPBACK,
    OPENED_BY,
    AuthScope,
    BearerName,
    KeyName,
    Keys,
    is_keyless,
    lacking,
    openers,
    refusal,
    require_loopback,
)
from services.wire.errors import ForbiddenError, UnauthenticatedError, UsageError
from tests.support.mesh_command import run_command
from weight_bus.vllm.endpoints import read_settings

NAMES = get_args(KeyName)
BEARERS = get_args(BearerName)
SCOPES = get_args(AuthScope)
keyrings = st.builds(Keys, **{name: st.sampled_from([None, f"key-of-{name}"]) for name in NAMES})


@given(keys=keyrings, scope=st.sampled_from(SCOPES), shown=st.sampled_from([f"key-of-{name}" for name in NAMES] + [""]))
def test_a_scope_is_granted_by_its_own_keys_and_by_another_bearer_only_where_it_has_none(
    keys: Keys, scope: AuthScope, shown: str
) -> None:
    refused = refusal(shown, keys, scope)
    bearers = {name for name in BEARERS if keys.get(name) is not None}
    if not bearers:
        assert refused is None, "a service without keys is open"
        return
    name = shown.removeprefix("key-of-")
    own = bearers & set(OPENED_BY[scope])
    if name in bearers and (name in own or (not own and name != "metrics")):
        assert refused is None
    elif name in bearers:
        assert isinstance(refused, ForbiddenError)
    else:
        assert isinstance(refused, UnauthenticatedError), "weights, session and redis keys are no bearers"
    assert refused is None or shown not in refused.remedy or not shown


@given(keys=keyrings, scope=st.sampled_from(SCOPES))
def test_a_service_with_any_bearer_has_no_open_scope(keys: Keys, scope: AuthScope) -> None:
    some = any(keys.get(name) is not None for name in BEARERS)
    assert is_keyless(keys) == (not some)
    assert (refusal("", keys, scope) is None) == (not some)
    others = any(keys.get(name) is not None for name in BEARERS if name != "metrics")
    assert bool(openers(keys, scope)) == (others or (some and scope == "metrics"))


@given(keys=keyrings, scope=st.sampled_from(SCOPES))
def test_a_metrics_key_opens_metrics_and_nothing_else(keys: Keys, scope: AuthScope) -> None:
    keys = replace(keys, metrics="key-of-metrics")
    refused = refusal("key-of-metrics", keys, scope)
    assert (refused is None) == (scope == "metrics")
    assert refused is None or isinstance(refused, ForbiddenError)


@pytest.mark.parametrize("service", OFF_LOOPBACK)
def test_a_service_that_may_leave_loopback_has_a_key_of_its_own_for_every_scope_but_the_peers(service: str) -> None:
    keys = Keys(**dict.fromkeys(OFF_LOOPBACK[service], "k" * 16))  # type: ignore[index]
    assert lacking(keys, service) == ()  # type: ignore[arg-type]
    assert all(openers(keys, scope) for scope in SCOPES)
    with pytest.raises(UsageError, match="there is no "):
        require_loopback("0.0.0.0", lacking(Keys(), service))  # type: ignore[arg-type]
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        require_loopback(host, lacking(Keys(), service))  # type: ignore[arg-type]


def test_keys_stay_out_of_what_is_printed() -> None:
    assert "secret" not in repr(Keys(**{name: f"a-secret-{name}" for name in NAMES}))


def test_init_writes_every_key_for_its_owner_alone_and_overwrites_none(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    done = run_command(["keys", "init", str(folder)])
    assert (done.code, done.err) == (0, "")
    written = {name: key_file(folder, name).read_text() for name in NAMES}
    assert len(set(written.values())) == len(NAMES)
    assert all(len(text.strip()) >= 43 for text in written.values()), "256 bits, base64"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not any(text.strip() in done.out for text in written.values())

    key_file(folder, "peer").unlink()
    made, kept = make_keys(folder)
    assert [path.name for path in made] == ["peer.key"]
    assert len(kept) == len(NAMES) - 1
    for name in set(NAMES) - {"peer"}:
        assert key_file(folder, name).read_text() == written[name]
    assert {path.name for path in folder.iterdir()} == {f"{name}.key" for name in NAMES}, "nothing half made is left"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_command(["keys", "init", str(tmp_path / "file" / "keys")])
    assert done.code == 2
    assert "keys cannot be written" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("holder", GIVEN)
def test_each_process_reads_its_own_keys_and_no_other(tmp_path: Path, holder: str) -> None:
    make_keys(tmp_path)
    for name in set(NAMES) - set(GIVEN[holder]):  # type: ignore[index]
        key_file(tmp_path, name).unlink()
    keys = read_keys(holder, tmp_path)  # type: ignore[arg-type]
    assert {name for name in NAMES if keys.get(name) is not None} == set(GIVEN[holder])  # type: ignore[index]
    for name in set(GIVEN[holder]) - {"redis", "metrics"}:  # type: ignore[index]
        hidden = key_file(tmp_path, name).rename(tmp_path / "hidden")
        with pytest.raises(UsageError, match=f"{name}.key"):
            read_keys(holder, tmp_path)  # type: ignore[arg-type]
        hidden.rename(key_file(tmp_path, name))


@pytest.mark.parametrize("holder", GIVEN)
def test_a_folder_of_before_there_was_a_metrics_key_goes_on(tmp_path: Path, holder: str) -> None:
    make_keys(tmp_path)
    key_file(tmp_path, "metrics").unlink()
    keys = read_keys(holder, tmp_path)  # type: ignore[arg-type]
    assert keys.metrics is None
    if keys.peer is not None:
        assert refusal(keys.peer, keys, "metrics") is None


def test_a_single_file_goes_before_the_folder(tmp_path: Path) -> None:
    make_keys(tmp_path)
    own = tmp_path / "mine"
    own.write_text("a-key-of-sixteen-letters\n")
    keys = read_keys("weight-bus", tmp_path, {"admin": own, "weights": None})
    assert keys.admin == "a-key-of-sixteen-letters"
    assert keys.peer == key_file(tmp_path, "peer").read_text().strip()
    assert read_keys("weight-bus", None, {"admin": own}) == Keys(admin="a-key-of-sixteen-letters")


def test_a_plain_engine_takes_the_folder_by_its_environment_variables(tmp_path: Path) -> None:
    make_keys(tmp_path)
    told = {"ROLLMESH_RUN_ID": "r", "ROLLMESH_BUS_URL": "http://127.0.0.1:1", "ROLLMESH_KEYS_DIR": str(tmp_path)}
    settings = read_settings("127.0.0.1", 8000, told)
    assert settings is not None
    assert settings.keys == read_keys("engine", tmp_path)
    assert settings.bus_key is None, "the peer key is shown to the bus"
    own = tmp_path / "mine"
    own.write_text("a-key-of-sixteen-letters")
    single = read_settings("127.0.0.1", 8000, {"ROLLMESH_RUN_ID": "r", "ROLLMESH_ADMIN_KEY_FILE": str(own)})
    assert single is not None
    assert single.keys == Keys(admin="a-key-of-sixteen-letters")


def test_a_redis_may_have_no_password_and_its_own_may_be_short(tmp_path: Path) -> None:
    make_keys(tmp_path)
    key_file(tmp_path, "redis").unlink()
    assert read_keys("gateway", tmp_path).redis is None
    key_file(tmp_path, "redis").write_text("short")
    assert read_keys("gateway", tmp_path).redis == "short"


@given(password=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
def test_a_redis_address_takes_a_password_and_is_printed_without(password: str) -> None:
    from redis.asyncio.connection import parse_url

    signed = with_password("redis://redis.internal:6380/2", password)
    assert parse_url(signed) | {"connection_class": None} == {
        **{"password": password, "host": "redis.internal", "port": 6380, "db": 2, "connection_class": None}
    }
    assert without_password(signed) == "redis://redis.internal:6380/2"
    assert parse_url(with_password("redis://ann@[::1]:1/0", password))["username"] == "ann"


@pytest.mark.parametrize("url", ["redis://:pass-word@127.0.0.1/0", "redis://127.0.0.1/0?password=pass-word"])
def test_a_password_on_a_command_line_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="by file") as refused:
        with_password(url, None)
    assert "pass-word" not in str(refused.value)


def test_a_session_key_of_one_run_opens_nothing_in_another() -> None:
    one, other = (SessionKeys(secret_of_run("k" * 43, run)) for run in ("run-1", "run-2"))
    key = one.issue("s")
    assert one.session_of(key) == "s"
    assert other.session_of(key) is None
