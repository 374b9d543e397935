"""Programs that run under the interpreter of the software we compare with; nothing here imports moonbus."""
