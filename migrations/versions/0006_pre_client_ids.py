"""What clients call their requests, to be found by.

Store-managers of the version before write and read requests without it. Whoever reads or writes ``request_done`` waits
until the index is made, for the time of one scan of it: both steps are one transaction, and the column's lock lasts
until its end.
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
