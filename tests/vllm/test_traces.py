"""Spans go through vLLM's own tracing, and only if it is switched on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.cascade import Cascade
from support.keys import keys

from kvcascade.manager.core import ManagerOptions
from kvcascade.vllm import engine_facts, generation, scheduler_side

trace = pytest.importorskip("opentelemetry.trace")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")


def engine(endpoint: str | None) -> Any:
    """An engine's configuration, as far as tracing is concerned."""
    vllm = pytest.importorskip("vllm.config.observability")
    return SimpleNamespace(
        observability_config=vllm.ObservabilityConfig(otlp_traces_endpoint=endpoint)
    )


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exporter of the process's tracer provider, as vLLM sets one up."""
    made = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return made


def test_a_promotion_and_a_demotion_are_exported(exporter: Any) -> None:
    on_transfer = scheduler_side.transfer_spans(engine("http://localhost:4317"))
    cascade = Cascade((8, 16), ManagerOptions(on_transfer=on_transfer))
    cascade.below_only(keys(0, 3))
    cascade.manager.lookup(keys(0, 3))
    cascade.manager.end_step()
    cascade.run_transfers()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["kvcascade.demote", "kvcascade.promote"]
    assert all(span.start_time <= span.end_time for span in spans)
    assert [span.attributes["kvcascade.blocks"] for span in spans] == [3, 3]


def test_nothing_is_traced_without_the_switch() -> None:
    assert not engine_facts.is_traced(engine(None)) and not engine_facts.is_traced(None)
    assert engine_facts.is_traced(engine("http://localhost:4317"))
    assert scheduler_side.transfer_spans(engine(None)) is None


def test_without_opentelemetry_there_is_no_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generation.span_maker() is not None
    monkeypatch.setattr("vllm.tracing.is_tracing_available", lambda: False)
    assert generation.span_maker() is None
