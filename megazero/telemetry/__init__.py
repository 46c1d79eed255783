"""Throughput, MFU, memory, and the places where metrics go."""

from megazero.telemetry.telemetry import Telemetry

__all__ = ["Telemetry"]
