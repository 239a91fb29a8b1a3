"""Whatever is asked of the engine is refused by an error of ours, or answered; it is whole afterwards."""

from typing import Any

from helpers.core import drain, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CapacityError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

NUMBERS = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31, 2**31 - 1, -(2**63), 2**63, 10**400, 5e-324, 1.5, -0.0, 1e308]),
    st.floats(),  # infinities and NaN, too
)
ODD = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(NUMBERS, max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(NUMBERS, NUMBERS, max_size=3),
    st.just("\ud800"),
    st.just(StructuredOutput(regex="a+")),
)
NAMES = sorted(SamplingParams.__dataclass_fields__)


@settings(max_examples=400, deadline=None)
@given(
    options=st.dictionaries(st.sampled_from([*NAMES, "top-k", "maxTokens"]), ODD, max_size=4),
    prompt=st.one_of(st.lists(NUMBERS, max_size=5), st.lists(st.integers(0, 49), min_size=1, max_size=300)),
    priority=st.one_of(st.just(0), ODD),
    cache_salt=st.one_of(st.just(""), ODD),
)
def test_a_request_of_any_kind(options: dict[str, Any], prompt: list[Any], priority: Any, cache_salt: Any):
    engine = make_engine()
    neighbour = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, seed=1))
    refusal = ""
    try:
        params = SamplingParams(**options)
        request = engine.add_request(prompt, params, priority=priority, cache_salt=cache_salt)
    except (RequestError, CapacityError) as error:
        refusal = str(error)
    if refusal:
        assert len(refusal) < 1000
    else:
        drain(engine)
        assert request.output is not None
        assert all(one.finish_reason in ("stop", "length") for one in request.output.outputs)
    drain(engine)
    assert neighbour.output is not None
    assert len(neighbour.output.token_ids) == 5
    assert engine.cache.num_owned == 0
    engine.close()
