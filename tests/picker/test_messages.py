from __future__ import annotations

import tracemalloc

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker.exchange import Message, Steer
from picker.messages import encode
from tests.picker.ext_proc import destination


def test_names_that_clients_make_up_are_not_kept() -> None:
    tracemalloc.start()
    for number in range(2000):
        name = f"x-warmpath-{number}".ljust(5000, "x")
        reply = Steer(Message.REQUEST_HEADERS, "192.0.2.1:8000", None, (name,))
        answer = ProcessingResponse.FromString(encode(reply))
        assert destination(answer) == "192.0.2.1:8000"
        assert name in answer.request_headers.response.header_mutation.remove_headers
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000
