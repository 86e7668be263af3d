"""Where bytes may live: `device` (what the limit bounds), `host` (a pinned slab), `file` (an unlinked slab file)."""
