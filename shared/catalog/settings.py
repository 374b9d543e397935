"""Where the catalog is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.settings import CommonSettings


class CatalogSettings(CommonSettings, frozen=True, kw_only=True):
    """What everything that opens the catalog takes."""

    postgres_url: Annotated[str, Meta(description="Postgres database, as postgresql://user:password@host:port/database.")] = (
        "postgresql://moonbus:moonbus@127.0.0.1:5432/moonbus")
