"""The store: objects in packs, rows in LMDB. Synchronous; knows no kernel, no network and no event loop."""
