"""What to send and when: ``traces`` reads arrivals, ``prompts`` gives them contents. Pure but for reading the file."""
