"""Pipelines. A schedule is data, checked when it is made; its cost is known before it runs; one executor runs it."""

from tfdist.extensions import pipeline
from tfdist.extensions.pipeline import *  # noqa: F403

__all__ = pipeline.__all__
