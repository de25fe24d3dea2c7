"""Telemetry for the people who run NeuroGrid: metrics for Prometheus, traces for collectors that speak OTLP.

Metrics are read from what is there when somebody asks; nothing here is on the way of a token. Serving them is the
matter of `neurogrid.server`. Names, labels and spans: docs/observability.md.
"""
