"""Frozen, typed configs: the only source of defaults."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of every config: frozen, hashable when its fields are, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
