"""Disk, atomic file writes, append logs and remote file systems: every fsync and every fsspec URL is here. Also the machine's clock."""
