"""Fronts: fixed functions of one record, computed once, whose features a private network is trained on.

Formal guarantee. A front has no parameter that is trained and sees one record at a time. So the features of
neighboring data sets are neighboring, and every ε of a network trained on features holds for the records.
"""
