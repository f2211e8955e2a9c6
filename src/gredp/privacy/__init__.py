"""The accounting path: certificate → ledger → accountant → ε. Nothing here imports torch."""
