"""Reading a tokenizer folder, and the chat template in its sandbox."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers_for_tests import byte_level
from transformers import AutoTokenizer

from expediter.core.errors import ConfigurationError, RequestError
from expediter.engine.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France? {{ 7 * 7 }}"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def _write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_chat_prompt_equals_transformers(smollm2_folder: Path, smollm2_tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2_folder)
    for messages in (MESSAGES, MESSAGES[1:]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smollm2_tokenizer.chat_prompt(messages) == expected


def test_smollm2_folder_is_read(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.eos_token_ids == (2,)
    assert smollm2_tokenizer.is_byte_level
    assert smollm2_tokenizer.token_text(2) == "<|im_end|>"
    ids = smollm2_tokenizer.encode("Hello, 世界!")
    assert smollm2_tokenizer.decode(ids) == "Hello, 世界!"
    assert b"".join(smollm2_tokenizer.token_bytes(id_) for id_ in ids).decode() == "Hello, 世界!"


def test_gateway_can_import_it_without_torch() -> None:
    code = (
        "import sys, expediter.engine.tokenizer, expediter.engine.detokenizer, expediter.engine.default_model, "
        "expediter.engine.sampling_params; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_end_ids_are_collected(folder: Path) -> None:
    _write(folder, "config.json", {"eos_token_id": 7, "vocab_size": 512})
    _write(folder, "generation_config.json", {"eos_token_id": [9, 7]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (9, 7)
    assert tokenizer.vocab_size == 512


def test_end_token_of_the_tokenizer_is_the_last_resort(folder: Path) -> None:
    _write(folder, "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode("<|end|>"))


def test_named_templates_and_their_helpers(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}{{ eos_token }}"
    )
    settings = {"eos_token": "<|end|>", "chat_template": [{"name": "default", "template": template}]}
    _write(folder, "tokenizer_config.json", settings)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.chat_prompt([{"role": "user", "content": "é"}] * 3)
    assert tokenizer.decode(ids, skip_special_tokens=False) == '"é""é"<|end|>'
    with pytest.raises(RequestError) as caught:
        tokenizer.chat_prompt([{"role": "bad", "content": ""}])
    assert caught.value.param == "messages"


def test_template_cannot_leave_its_sandbox(folder: Path) -> None:
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__base__ }}"):
        _write(folder, "chat_template.jinja", attack + "{{ cycler.__init__.__globals__.os.getcwd() }}")
        with pytest.raises(RequestError):
            Tokenizer.from_folder(folder).chat_prompt(MESSAGES)


def test_model_without_template_and_odd_text_are_refused(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(RequestError):
        tokenizer.chat_prompt(MESSAGES)
    with pytest.raises(RequestError):
        tokenizer.encode("lone \ud800 surrogate")


def test_unusable_folders_are_named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path_factory.mktemp("empty"))
    for name, content in (
        ("chat_template.jinja", "{% if %}"),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("tokenizer.json", "{}"),
    ):
        kept = (folder / name).read_text() if (folder / name).exists() else None
        _write(folder, name, content)
        with pytest.raises(ConfigurationError):
            Tokenizer.from_folder(folder)
        (folder / name).unlink()
        if kept is not None:
            _write(folder, name, kept)
