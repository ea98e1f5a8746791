"""The configuration file: what it may say, and an error with the file's name for the rest."""

from pathlib import Path

import pytest

from expediter.assembly.file_config import FileConfig, load_file_config
from expediter.core.errors import ConfigurationError
from expediter.core.slo import Slo, SloClass, parse_slo

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "slo.toml"


def write(tmp_path, text):
    path = tmp_path / "it.toml"
    path.write_text(text)
    return path


def test_without_a_file_everything_is_empty():
    assert load_file_config(None) == FileConfig() == FileConfig(slo_classes={}, api_keys={})


def test_classes_and_keys(tmp_path):
    text = '[slo_classes.fast]\nttft_s = 1\ntpot_s = 0.05\nvalue = 3\nrefuse_late = true\n[api_keys]\nalice = "k"\n'
    made = load_file_config(write(tmp_path, text))
    assert made.slo_classes == {"fast": SloClass(ttft_s=1.0, tpot_s=0.05, value=3.0, refuse_late=True)}
    assert made.api_keys == {"alice": "k"}


def test_the_example_of_the_documentation():
    assert set(load_file_config(EXAMPLE).slo_classes) == {"interactive", "standard", "refused", "batch"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[slo_classes.fast]\nttft = 1", "ttft"),
        ("[slo_classes.fast]\nttft_s = 0", "above 0"),
        ("[slo_classes.fast]\ntpot_s = nan", "finite"),
        ("[slo_classes.fast]\nvalue = -1", "value"),
        ("[slo_classes.fast]\nvalue = true", "float"),
        ("[slo_classes.fast]\nrefuse_late = 1", "bool"),
        ('[slo_classes."so fast"]', "no name"),
        ("[slo_class.fast]", "slo_class"),
        ('[api_keys]\nalice = ""', "empty"),
        ('[api_keys]\nalice = "k"\nbob = "k"', "same API key"),
        ("[api_keys]\nalice = 3", "str"),
        ("nonsense", "it.toml"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_file_config(write(tmp_path, text))
    assert "it.toml" in str(caught.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_file_config(tmp_path / "none.toml")
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"bytes\.toml"):
        load_file_config(path)


def test_own_targets_win_over_the_class():
    made = SloClass(ttft_s=1.0, e2e_s=9.0).with_targets(Slo(ttft_s=0.5, tpot_s=0.1))
    assert made == Slo(ttft_s=0.5, tpot_s=0.1, e2e_s=9.0)


def test_targets_on_the_command_line():
    assert parse_slo("ttft=1,tpot=0.1,e2e=30") == Slo(ttft_s=1.0, tpot_s=0.1, e2e_s=30.0)
    assert parse_slo("e2e=30") == Slo(e2e_s=30.0)
    with pytest.raises(ConfigurationError, match="e2e=SECONDS"):
        parse_slo("deadline=3")
