"""Room for why a request ran where it did: what conductors answered, with the candidates and their terms.

Store-managers of the version before write and read requests without it.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE request_done ADD COLUMN decisions jsonb")


def downgrade() -> None:
    op.execute("ALTER TABLE request_done DROP COLUMN decisions")
