"""Features: fixed functions of one record, computed once, which a private network is trained on.

Formal guarantee. A feature extractor has no trained parameter and sees one record at a time. So the features
of neighboring datasets are neighboring, and every ε of a network trained on features holds for the records.
"""
