"""The key of a launch: where it comes from, and which ones are refused."""

import os
from pathlib import Path

import pytest

from longseq_bench.core.errors import UserError
from longseq_bench.launchers.launch_key import KEY_VARIABLE, LaunchKey, file_of_user, find_key

LONG = "sixteen letters!"


def test_node_0_makes_a_key_up_and_other_nodes_need_it() -> None:
    first, second = (find_key({}, None, True, False) for _ in range(2))
    assert first.is_new
    assert first.secret != second.secret
    assert len(first.secret) >= 32
    assert first.secret.decode() not in repr(first)
    with pytest.raises(UserError, match="has no key; start it with the command that node 0 prints"):
        find_key({}, None, False, False)


def test_a_key_in_the_environment_is_removed_from_it() -> None:
    environ = {KEY_VARIABLE: f"{LONG}\n", "HOME": "/root"}
    assert find_key(environ, None, False, False) == LaunchKey(LONG.encode())
    assert environ == {"HOME": "/root"}


def test_a_short_key_is_refused() -> None:
    with pytest.raises(UserError, match="LONGSEQ_KEY holds a key of 6 characters"):
        find_key({KEY_VARIABLE: "secret"}, None, True, True)


def test_the_file_of_this_user_is_made_once(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "settings")}
    keys = {find_key(environ, None, is_node_0, True) for is_node_0 in (False, True)}
    assert len(keys) == 1
    path = file_of_user(environ)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert os.listdir(path.parent) == [path.name]


def test_node_0_makes_a_key_file_and_other_nodes_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(UserError, match="key can't be read: No such file"):
        find_key({}, path, False, False, timeout_s=0.0)
    made = find_key({KEY_VARIABLE: LONG}, path, True, False)
    assert not made.is_new
    assert made.secret != LONG.encode()
    assert find_key({}, path, False, False) == made


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_text(LONG)
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:o}.*chmod 600"):
        find_key({}, path, True, False)


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    os.mkfifo(path, 0o600)
    with pytest.raises(UserError, match="not a regular file"):
        find_key({}, path, True, False)
    with pytest.raises(UserError, match="can't be written"):
        find_key({}, Path("/proc/nowhere/key"), True, False)
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    with pytest.raises(UserError, match="folder can't be read: Is a directory"):
        find_key({}, folder, True, False)
    empty = tmp_path / "empty"
    empty.touch(0o600)
    with pytest.raises(UserError, match="empty holds a key of 0 characters"):
        find_key({}, empty, True, False)


def test_a_key_file_with_a_name_too_long_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(UserError, match=r"can't be written \(File name too long\)"):
        find_key({}, path, True, False)
    with pytest.raises(UserError, match="can't be read: File name too long"):
        find_key({}, path, False, False, timeout_s=60.0)


def test_a_key_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(LONG)
    path.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(UserError, match="belongs to another user"):
        find_key({}, path, False, False)


def test_each_launch_of_a_scheduler_has_a_key_of_its_own() -> None:
    key = LaunchKey(LONG.encode())
    first, again, second = (key.bound_to(job).secret for job in ("812.0", "812.0", "813.0"))
    assert first == again
    assert len({key.secret, first, second}) == 3
    assert LONG.encode() not in first
    assert key.bound_to("") == key
    # job ids are public
    assert LaunchKey(b"another 16 bytes").bound_to("812.0").secret != first
