"""The configuration file: what it may say, and an error with the file's name for the rest."""

from dataclasses import replace
from pathlib import Path

import pytest

from expediter.assembly.file_config import FileConfig, load_file_config
from expediter.control.health import HealthConfig
from expediter.control.limits import Limits
from expediter.control.waiting import QueueConfig
from expediter.core.errors import ConfigurationError
from expediter.core.slo import Slo, SloClass, parse_slo
from expediter.gateway.backends.registry import DEFAULT_ROUTING
from expediter.gateway.tenants import TenantConfig

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def write(tmp_path, text):
    path = tmp_path / "it.toml"
    path.write_text(text)
    return path


def test_without_a_file_everything_is_empty():
    assert load_file_config(None) == FileConfig() == FileConfig(slo_classes={}, tenants={})


def test_classes(tmp_path):
    text = "[slo_classes.fast]\nttft_s = 1\ntpot_s = 0.05\nvalue = 3\nrefuse_late = true\n"
    made = load_file_config(write(tmp_path, text))
    assert made.slo_classes == {"fast": SloClass(ttft_s=1.0, tpot_s=0.05, value=3.0, refuse_late=True)}


def test_tenants_and_queue(tmp_path):
    text = """
        [tenants.alice]
        key_hashes = ["00"]
        key_env = ["ALICE_KEY"]
        weight = 2
        priority = -1
        models = ["small"]
        max_requests_per_minute = 60
        [anonymous]
        max_concurrent_requests = 1
        [queue]
        ordering = "priority"
        max_requests = 3
    """
    made = load_file_config(write(tmp_path, text))
    assert made.tenants == {
        "alice": TenantConfig(
            key_hashes=("00",),
            key_env=("ALICE_KEY",),
            weight=2.0,
            priority=-1,
            models=("small",),
            limits=Limits(max_requests_per_minute=60),
        )
    }
    assert made.anonymous == TenantConfig(limits=Limits(max_concurrent_requests=1))
    assert made.queue == QueueConfig(ordering="priority", max_requests=3)
    assert made.weights == {"alice": 2.0, "": 1.0}


def test_routing_and_health_of_backends(tmp_path):
    made = load_file_config(write(tmp_path, "[routing]\nindex_max_bytes = 99999\n[health]\nmax_ejected_share = 0.5\n"))
    assert made.routing == replace(DEFAULT_ROUTING, index_max_bytes=99999)
    assert made.health == HealthConfig(max_ejected_share=0.5)
    assert FileConfig().routing == DEFAULT_ROUTING


def test_the_doors_table_holds_fields_of_several_parts(tmp_path):
    text = "[door]\nmax_body_bytes = 5\nmin_progress_s = 1\nmax_attempts = 2\n"
    made = load_file_config(write(tmp_path, text)).door
    assert (made.http.max_body_bytes, made.patience.min_progress_s, made.retry.max_attempts) == (5, 1.0, 2)


def test_the_examples_of_the_documentation():
    assert set(load_file_config(EXAMPLES / "slo.toml").slo_classes) == {"interactive", "standard", "refused", "batch"}
    tenants = load_file_config(EXAMPLES / "tenants.toml").tenant_book((), {})
    assert set(tenants.tenants) == {"chat", "batch", ""}


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
        ("[tenants.alice]\nkey = 3", "key"),
        ("[tenants.alice]\nmax_requests_per_minute = 0", "at least 1"),
        ("[tenants.alice]\npriority = 0.5", "int"),
        ('[tenants."a/b"]', "no name"),
        ("[anonymous]\nkey_hashes = []", "key_hashes"),
        ('[queue]\nordering = "fast"', "fair_share"),
        ("[queue]\nmax_tokens = -1", "negative"),
        ("[queue]\nmax_requests = 1.5", r"\[queue\].*int"),
        ("[routing]\nindex_bytes = 3", r"\[routing\] has no 'index_bytes'; .*index_max_bytes"),
        ('[routing]\nname = "best"', "predicted_ttft"),
        ('[routing]\nkeep_sessions = "yes"', "bool"),
        ("[health]\njitter = 2", "jitter"),
        ("[door]\nfactor = 2", "factor"),
        ("[door]\nmax_attempts = 0", "max_attempts"),
        ("[[backends]]\nname = 'x'", "url"),
        ("[[backends]]\nurl = 3", "str"),
        ("nonsense", "it.toml"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_file_config(write(tmp_path, text))
    assert "it.toml" in str(caught.value)


PLACES = """\
[slo_classes.fast]
ttft_s = 1

[tenants.alice]
key_hashes = ["00"]
weight = 2
[tenants."bob.b"]
priority = 1
max_requests_per_minute = 5
[[backends]]
url = "http://127.0.0.1:1"
[[backends]]
url = "http://127.0.0.1:2"
models = [
    "a",
    "b",
]
max_requests = 4
[failures]
slow_factor = 2
[[failures.crashes]]
replica = 0
at_s = 1
[[failures.crashes]]
replica = 1
at_s = 2
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ttft_s = 1", "ttft = 1", r":2: \[slo_classes\.fast\] has no 'ttft'; there are: e2e_s, refuse_late"),
        ("ttft_s = 1", "ttft_s = -1", r":1: \[slo_classes\.fast\] SLO ttft must"),
        (
            "weight = 2",
            "wieght = 2",
            r":6: \[tenants\.alice\] has no 'wieght'; there are: .*max_tokens_per_minute.*weight",
        ),
        ("weight = 2", 'weight = "2"', r":6: \[tenants\.alice\] weight: Expected `float`, got `str`"),
        ('["00"]', '["00", 3]', r":5: \[tenants\.alice\] key_hashes\[1\]: Expected `str`, got `int`"),
        ("priority = 1", "priority = 1.5", r":8: \[tenants\.bob\.b\] priority: Expected `int"),
        ("minute = 5", "minute = 0", r":9: \[tenants\.bob\.b\] max_requests_per_minute must be at least 1, not 0"),
        (
            "max_requests = 4",
            "max_request = 4",
            r":18: \[\[backends\]\] number 2 \(http://127.0.0.1:2\) has no 'max_request'",
        ),
        (
            "max_requests = 4",
            "max_requests = 0",
            r":18: \[\[backends\]\] number 2 \(http://127.0.0.1:2\) max_requests must be at least 1",
        ),
        ('"http://127.0.0.1:2"', '"ftp://x"', r":12: \[\[backends\]\] number 2 \(ftp://x\) .*http://"),
        ('    "b"', "    2", r":14: \[\[backends\]\] number 2 .* models\[1\]: Expected `str`, got `int`"),
        ("replica = 1", "replika = 1", r":25: \[\[failures\.crashes\]\] number 2 has no 'replika'"),
        ("[failures]", "[failure]", r":19: there is no \[failure\]; there are: .*failures"),
        ("[[backends]]", "[backends]", r"it\.toml"),
    ],
)
def test_errors_say_in_which_table_and_on_which_line(tmp_path, old, new, message):
    assert load_file_config(write(tmp_path, PLACES)).backends[1].max_requests == 4
    text = PLACES.replace(old, new)
    with pytest.raises(ConfigurationError, match=rf"it\.toml{message}" if message[0] == ":" else message):
        load_file_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queue = 3", r"\[queue\] is no table"),
        ("tenants = {alice = 3}", r"\[tenants\.alice\] is no table"),
        ('tenants = {alice = {weight = "x"}}', r"it\.toml: \[tenants\.alice\] weight"),
        ("backends = {url = 'http://x'}", r"\[backends\] is no array of tables"),
        ("failures.crashes = 3", r"\[failures\.crashes\] is no array of tables"),
        ("[failures]\ncrashes = [{replica = 0, at_s = 1}, {replica = 0}]", r"crashes\]\] number 2 .*at_s"),
    ],
)
def test_tables_in_other_ways_of_writing(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        load_file_config(write(tmp_path, text))


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
