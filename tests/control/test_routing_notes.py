"""Why a request was sent where it was, in words."""

from fleets import HandFleet, request_of, requests_sharing

from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.routing.notes import RoutingNotes, span_of
from expediter.control.speed import Speed
from expediter.core.explanation import Reason, Span
from expediter.core.slo import Slo

SPEED = Speed(step_s=0.01, token_s=1e-3, is_known=True)
WAITED = (Span(0.0, 1.0, Reason.QUEUED),)


def test_a_placement_says_what_was_compared():
    hand, policy = HandFleet(0, 500, 900, speed=SPEED), make_router(RoutingConfig(name="cache_aware"))
    span = span_of(hand.send(policy, request_of(100)), 3.0)
    assert (span.reason, span.from_s, span.to_s) == (Reason.ROUTED, 3.0, 3.0)
    assert span.in_words() == (
        "sent to replica 0: nobody holds enough of the prompt to make up for its load, and it has the least to "
        "compute; at cost 100, replica 1 at 600, replica 2 at 1000"
    )


def test_a_hit_a_handoff_and_a_refusal_are_told():
    hand = HandFleet(0, 0, roles=("prefill", "decode"), speed=SPEED)
    policy = make_router(RoutingConfig(name="mooncake", early_rejection="early"))
    first, second = requests_sharing(2, 640, 10, slo=Slo(ttft_s=2.0))
    hand.send(policy, first)
    hand.set(0, num_pending_tokens=0)
    words = span_of(hand.send(policy, second), 0.0).in_words()
    assert words.startswith("sent to replica 0: its first token is expected after 0.010 s, 640 tokens of it cached")
    assert words.endswith("replica 1 goes on with it")
    hand.set(0, num_pending_tokens=5000)
    refused = span_of(hand.send(policy, first), 0.0)
    assert refused.in_words() == "refused: the first token is expected after 5.010 s, the target is 2 s"


def test_only_the_newest_are_kept():
    notes, hand, policy = RoutingNotes(2), HandFleet(0, 0), make_router(RoutingConfig())
    for name in ("a", "b", "c"):
        request = request_of(5, name)
        notes.note((request,), hand.send(policy, request), 1.0)
    assert notes.before("a", WAITED) == WAITED
    assert [span.reason for span in notes.before("c", WAITED)] == [Reason.ROUTED, Reason.QUEUED]
