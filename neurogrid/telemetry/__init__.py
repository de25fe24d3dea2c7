"""What NeuroGrid tells those who run it: metrics for Prometheus, traces for whoever speaks OTLP.

Metrics are read from what is there when somebody asks; nothing here is on the way of a token. Serving them is the
matter of `neurogrid.server`. Names, labels and spans: docs/observability.md.
"""
