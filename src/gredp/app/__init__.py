"""The application: what the `gredp` command needs beyond the library. The library never imports it."""
