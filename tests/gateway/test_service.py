"""Every field of a body reaches the scheduler's request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_server import EOS

from expediter.core.clock import VirtualClock
from expediter.core.errors import ConfigurationError
from expediter.core.request import CacheHint, Request, SamplingParams
from expediter.core.slo import Slo
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.api.completions import CompletionBody
from expediter.gateway.bodies import decode_body
from expediter.gateway.chat_body import ChatBody
from expediter.gateway.grammars import Grammars
from expediter.gateway.info import ServerInfo
from expediter.gateway.service import Asked, GatewayConfig, Service
from expediter.gateway.terms import Terms
from expediter.scheduling.build import PolicyConfig

COMPLETION = msgspec.json.Decoder(CompletionBody)
CHAT = msgspec.json.Decoder(ChatBody)
TERMS = Terms(
    tenant="t", priority=-4, cache_salt="t/s", slo=Slo(ttft_s=0.5), slo_class="c", value=2.0, refuse_late=True
)
INFO = ServerInfo(
    preset="p",
    policy=PolicyConfig(),
    prefix_caching=True,
    routing="r",
    replicas=1,
    block_size=4,
    num_blocks=16,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    max_model_len=100,
)


@pytest.fixture
def service(model_folder: Path) -> Iterator[Service]:
    config = GatewayConfig(model_names=("m",), max_model_len=100, num_kv_tokens=64, info=INFO)
    text, grammars = Tokenizer.from_folder(model_folder), Grammars(model_folder)
    made = Service(config, None, text, VirtualClock(7.0), grammars)  # type: ignore[arg-type]
    yield made
    made.close()


def completion(service: Service, prompt: Any = "abc", **fields: Any) -> list[Request]:
    body = decode_body(msgspec.json.encode({"prompt": prompt, **fields}), COMPLETION)
    prompts = [asyncio.run(service.prompts.of_text(text)) for text in ([prompt] if isinstance(prompt, str) else prompt)]
    asked = Asked(
        prompts=prompts,
        terms=TERMS,
        grammar=None,
        max_tokens=body.max_tokens,
        default_max_tokens=16,
        num_alternatives=body.logprobs,
        num_per_prompt=body.n or 1,
    )
    return [choice.request for choice in service.generation(body, asked).choices]


def chat(service: Service, **fields: Any) -> list[Request]:
    messages = [{"role": "user", "content": "abc"}]
    body = decode_body(msgspec.json.encode({"messages": messages, **fields}), CHAT)
    return [choice.request for choice in asyncio.run(service.chat(body, TERMS)).choices]


def test_defaults(service: Service) -> None:
    (request,) = completion(service)
    assert request.prompt.tolist() == [97, 98, 99]
    assert (request.max_tokens, request.min_tokens) == (16, 0)
    assert request.stop_token_ids == (EOS,)
    assert request.sampling == SamplingParams()
    assert request.arrival_s == 7.0
    assert (request.tenant, request.slo, request.slo_class, request.value, request.refuse_late) == (
        *("t", Slo(ttft_s=0.5), "c", 2.0, True),
    )
    (request,) = chat(service)
    assert request.max_tokens == 62, "what the KV pool leaves: 64 tokens, and one more that is never fed back"


def test_what_a_request_has_waited_at_the_door_counts(service: Service) -> None:
    body = decode_body(b'{"messages": [{"role": "user", "content": "abc"}]}', CHAT)
    generation = asyncio.run(service.chat(body, replace(TERMS, arrived_s=3.0)))
    assert [choice.request.arrival_s for choice in generation.choices] == [3.0]


def test_every_field(service: Service) -> None:
    fields = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.5},
        **{"presence_penalty": -1, "frequency_penalty": 1, "logit_bias": {"7": -2}, "max_tokens": 9, "min_tokens": 2},
        **{"cache_hint": {"pin_s": 30}, "stop_token_ids": [9, 8], "logprobs": 2},
    }
    (request,) = completion(service, **fields)
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias=((7, -2.0),),
        logprobs=2,
    )
    assert (request.max_tokens, request.min_tokens, request.priority, request.cache_salt) == (9, 2, -4, "t/s")
    assert request.cache_hint == CacheHint(pin_s=30.0)
    assert request.stop_token_ids == (8, 9, EOS)
    assert completion(service, ignore_eos=True, stop_token_ids=[9])[0].stop_token_ids == (9,)


def test_choices_have_ids_and_seeds_of_their_own(service: Service) -> None:
    requests = completion(service, ["a", "b"], n=3, seed=10)
    assert [request.sampling.seed for request in requests] == [10, 11, 12] * 2
    assert len({request.request_id for request in requests}) == 6
    assert [request.prompt.tolist() for request in requests] == [[97]] * 3 + [[98]] * 3
    assert [request.sampling.seed for request in completion(service, n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]
    assert [request.sampling.seed for request in completion(service, n=2)] == [None, None]


def test_chat_logprobs_and_limits(service: Service) -> None:
    assert chat(service)[0].sampling.logprobs is None
    assert chat(service, logprobs=True)[0].sampling.logprobs == 0
    assert chat(service, logprobs=True, top_logprobs=4)[0].sampling.logprobs == 4
    assert chat(service, max_tokens=3, max_completion_tokens=5)[0].max_tokens == 5


def test_config_is_checked() -> None:
    for wrong in ({"model_names": ()}, {"model_names": ("",)}, {"max_model_len": 0}, {"num_kv_tokens": 0}):
        with pytest.raises(ConfigurationError):
            GatewayConfig(**{"model_names": ("m",), "max_model_len": 1, "num_kv_tokens": 1, "info": INFO, **wrong})


def test_a_hint_to_drop(service: Service) -> None:
    (request,) = completion(service, cache_hint="drop")
    assert request.cache_hint == CacheHint(drop=True)
    (request,) = chat(service, cache_hint=None)
    assert request.cache_hint is None
