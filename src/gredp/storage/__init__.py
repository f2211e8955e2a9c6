"""Every file on disk: its name, format, version, writer and reader."""
