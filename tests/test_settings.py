"""Settings: unset, empty and wrong values of each."""

import pytest

from qwen38_3090 import settings
from qwen38_3090.settings import OFF, SettingError, Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in settings.names():
        monkeypatch.delenv(name, raising=False)


def test_unset_leaves_everything_to_the_mode():
    found = Settings.read()
    assert {getattr(found, a) for a in settings.names().values()} == {None, 18020, ""}


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("SPEC", OFF),
        ("DRAFT", OFF),
        ("LOOKUP", False),
        ("PREFIX_CACHE", False),
        ("KV", OFF),
        ("INT8_ACT", False),
        ("INT8_LAYERS", OFF),
        ("MAX_LEN", OFF),
        ("MAX_SEQS", OFF),
        ("GPU_UTIL", OFF),
        ("KV_MEM", OFF),
        ("VLLM_API_KEY", ""),
        ("TOOLS", False),
        ("EXTRA_ARGS", ""),
    ],
)
@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_is_off(monkeypatch, name, meaning, empty):
    monkeypatch.setenv(name, empty)
    assert str(getattr(Settings.read(), settings.names()[name])).strip() == str(meaning)


@pytest.mark.parametrize("name", ["MODE", "MODEL", "CTX", "DRAFT_TOKENS", "DFLASH_TOKENS", "LISTEN", "PORT"])
def test_empty_where_off_means_nothing(monkeypatch, name):
    monkeypatch.setenv(name, "")
    with pytest.raises(SettingError, match=f"^{name}=: it cannot be off; unset it for the default"):
        Settings.read()


def test_every_setting_has_its_empty_value_tested():
    cannot = {"MODE", "MODEL", "CTX", "DRAFT_TOKENS", "DFLASH_TOKENS", "LISTEN", "PORT"}
    marks = test_empty_is_off.pytestmark
    can = {name for mark in marks if mark.args[0] != "empty" for name, _ in mark.args[1]}
    assert cannot | can == set(settings.names()) and not cannot & can


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SPEC", "medusa", "it must be off | mtp | dflash2"),
        ("CTX", "big", "it must be fast | long | huge"),
        ("MODE", "turbo", "it must be single | batch | demo"),
        ("DRAFT_TOKENS", "0", "greater than or equal to 1. DRAFT_TOKENS: .*SPEC=off"),
        ("DRAFT_TOKENS", "21", "less than or equal to 20"),
        ("DRAFT_TOKENS", "four", "valid integer"),
        ("DFLASH_TOKENS", "7.5", "valid integer"),
        ("LOOKUP", "maybe", r"it must be 0 \| 1"),
        ("MAX_LEN", "8", "greater than or equal to 16"),
        ("MAX_LEN", "64k", "valid integer"),
        ("MAX_SEQS", "-1", "greater than or equal to 1"),
        ("GPU_UTIL", "95", "less than or equal to 1"),
        ("GPU_UTIL", "0", "greater than 0"),
        ("KV_MEM", "-2", "greater than 0"),
        ("PORT", "http", "valid integer"),
        ("PORT", "0", "greater than or equal to 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_meaning(monkeypatch, name, value, reason):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"^{name}={value}: .*{reason.replace(' | ', ' .| ').replace('.|', '[|]')}"):
        Settings.read()


def test_several_wrong_values_are_all_named(monkeypatch):
    monkeypatch.setenv("SPEC", "x")
    monkeypatch.setenv("MAX_LEN", "y")
    with pytest.raises(SettingError) as caught:
        Settings.read()
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["SPEC", "MAX_LEN"]


@pytest.mark.parametrize(
    ("name", "value", "meaning"), [("TOOLS", "no", False), ("LOOKUP", "1", True), ("SPEC", "off", OFF)]
)
def test_spellings(monkeypatch, name, value, meaning):
    monkeypatch.setenv(name, value)
    assert getattr(Settings.read(), settings.names()[name]) == meaning


def test_table_covers_every_setting():
    rows = settings.table()
    assert [row[0] for row in rows] == list(settings.names())
    assert all(len(row) == 4 and all(row) for row in rows)
