"""Requests made from our own OpenAPI document, valid and broken: no 5xx, no answer it does not promise."""

from collections import Counter

import pytest
import schemathesis
from helpers.serve import running_server
from helpers.tiny_model import write_model_folder
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
WITH_BODY = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /tokenize",
    "POST /detokenize",
]
WITHOUT = ["GET /v1/models", "GET /v1/models/{model}", "GET /v1/engine/state", "GET /health"]
ENDLESS = {"GET /v1/engine/events"}


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    # A short context: every answer is one.
    folder = write_model_folder(tmp_path_factory.mktemp("models") / "short", max_position_embeddings=96)
    load = ("--load-format", "dummy", "--num-threads", "1", "--num-blocks", "256")
    with running_server(folder, *load) as server:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        found = [result.ok() for result in document.get_all_operations()]
        yield {f"{operation.method.upper()} {operation.path}": operation for operation in found}
        assert server.process.poll() is None
        assert "Traceback" not in server.said()


def test_every_operation_is_tried(operations):
    assert set(operations) - ENDLESS == {*WITH_BODY, *WITHOUT}


def answers(operation, mode):
    """Statuses of what was answered to requests made up from the document; each was checked against it."""
    statuses = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answered(case):
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    answered()
    return statuses


@pytest.mark.parametrize("name", [*WITH_BODY, *WITHOUT])
def test_what_the_document_allows_gets_an_answer_that_it_promises(operations, name):
    statuses = answers(operations[name], GenerationMode.POSITIVE)
    # What no document can say (an unknown model, a prompt that is too long) is refused all the same.
    assert set(statuses) <= {200, 400, 404}
    if name != "GET /v1/models/{model}":  # the document does not say which names there are
        assert statuses[200] > 0


@pytest.mark.parametrize("name", WITH_BODY)
def test_what_the_document_forbids_is_refused(operations, name):
    statuses = answers(operations[name], GenerationMode.NEGATIVE)
    assert set(statuses) <= {400, 404}
    assert statuses[400] > 10
