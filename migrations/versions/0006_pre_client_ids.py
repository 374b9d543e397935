"""What clients call their requests, to be found by.

Store-managers of the version before write and read requests without it. Making the index holds up writers of
``request_done``, for the time of one scan of it.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute('ALTER TABLE request_done ADD COLUMN client_id text COLLATE "C"')
    op.execute("CREATE INDEX request_done_client_id ON request_done (client_id) WHERE client_id IS NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE request_done DROP COLUMN client_id")
