"""Rail B: certificate → ledger → accountant → ε. Nothing here imports torch."""
