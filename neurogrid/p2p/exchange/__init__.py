"""Requests and answers over the streams of a host: dispatch, handlers, deadlines, counters, and the named API."""
