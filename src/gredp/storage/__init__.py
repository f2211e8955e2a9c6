"""Every file on disk: its name, format, version, writer and reader.

Format policy. Ledgers and records carry a format and a version; checkpoints belong to the ledger beside them.
A new version of gredp reads an old file, or rejects it in one line that names the file and its version.
It never guesses: a wrong guess would be a wrong ε. A field never changes its meaning.

| file | written and read by | format |
|---|---|---|
| ledger | `ledger_file` | gredp-ledger 1 |
| ledger.mark | `evidence` | two sealed slots |
| checkpoint-N.json, checkpoint-N.safetensors, split, lock | `run_folder` | sealed JSON, safetensors |
| settings.json | `gredp train` | sealed JSON |
| record.json | `record`: `save`, and `load` as the only reader | gredp-record 1 |
"""
