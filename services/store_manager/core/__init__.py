"""What the store-manager decides; pure."""
