"""The paper's tables, figures and ablations, run again: `gredp reproduce`."""
