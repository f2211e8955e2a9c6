"""The cases of docs/reliability.md: what is injected, what must come of it; tests name them by their key."""

CASES: dict[str, tuple[str, str]] = {
    "kill points": (
        "kill -9 before and after charge, mark, noise, update, fsync, rename and unlink, and within a write",
        "every noised step is charged, no draw repeated; resumes from an intact checkpoint, ends within ε",
    ),
    "kill at start": (
        "kill -9 while the run's folder is made",
        "resumes, or is rejected in one line with nothing charged",
    ),
    "kill again": (
        "one run killed after every second step until its budget is spent",
        "ends within ε; lost steps stay charged",
    ),
    "kill random": ("kill -9 at random times", "as at the named points"),
    "kill user": (
        "`gredp train`, kill -9, `gredp train --resume`, Ctrl-C, as typed",
        "resumes; each message is one line that says how to resume",
    ),
    "signals": ("SIGINT, SIGTERM, in training and before", "checkpoint without loss, exit status 130 or 143"),
    "damaged checkpoint": (
        "checkpoint cut at every 1/50 of its length, emptied, single bits flipped",
        "always detected; the one before it is used, with a warning",
    ),
    "no checkpoint": ("both checkpoints damaged", "rejected"),
    "edited": (
        "ε or noise multiplier edited in settings, checkpoint or ledger",
        "detected; rejected or skipped",
    ),
    "damaged ledger": (
        "ledger with bits flipped, lines removed, repeated, moved, or cut off its end; mark torn or gone",
        "rejected; a last line cut off by a crash counts as a step, a torn mark as the previous one",
    ),
    "disk full": (
        "RLIMIT_FSIZE and a small tmpfs, while charging and while writing a checkpoint",
        "one line; the old checkpoint is intact; resumes when there is room",
    ),
    "read-only": ("folder of mode 500", "rejected before training"),
    "small data": (
        "empty draw, batch of one, N smaller than the batch, N = 0",
        "works, works, rejected with the numbers, rejected",
    ),
    "bad data": (
        "labels −1, K, float, of another length; images of other shapes or types, NaN, infinite",
        "rejected at load, before any charge",
    ),
    "bad options": (
        "ε, δ, σ, C, learning rate, batch size out of range or not numbers",
        "rejected in one line",
    ),
    "changed settings": (
        "another z, C, rate, method, loss, number of processes or data on resume",
        "rejected with both values; a fork composes",
    ),
    "one lock": ("20 resumes of one run at once", "exactly one trains; a dead process' lock is free"),
    "copied folder": (
        "a run's folder copied, both resumed",
        "both branches are charged, each to its own ledger",
    ),
    "crafted checkpoint": (
        "pickles, oversized or lying headers, deep JSON, links, pipes, sparse files, numbers out of range",
        "rejected; nothing runs, nothing is written elsewhere",
    ),
    "crafted data": (
        "archives with ../, pickles, code in headers, bombs, flipped bits",
        "rejected, or read unchanged; nothing runs, nothing is written",
    ),
    "ranks' noise": (
        "1, 2 and 4 processes: noise added by each, summed, averaged, divided; one seed for all",
        "noise of the certificate, drawn once; processes bit-equal after every step",
    ),
    "lost rank": (
        "one of several processes killed, stopped (SIGSTOP) or told to end, at each point of a step",
        "all end within the timeout; charged before released; only the first writes; resumes",
    ),
    "ranks apart": (
        "a process steps an old batch, another model, without a backward, or holds other records",
        "the worst decides what all charge, or all refuse in one line before a sum leaves its process",
    ),
    "secret": ("every file of a run searched for the secret and each key", "not found"),
    "noise reuse": ("draws of all steps, blocks and starts under one seed", "all different"),
}
